"""Things that wait: the device's queues, the door from threads into a loop, token streams.

They carry items and know nothing of requests, schedulers or models.
"""

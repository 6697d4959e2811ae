"""Pure decisions: what each step computes, and whose KV blocks and encoder rows stay.

Neither torch nor asyncio, no clock and no randomness: the same calls give the same plans.
"""

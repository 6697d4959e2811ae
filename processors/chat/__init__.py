"""Conversations: messages and tools rendered to a prompt, and answers read back into messages."""

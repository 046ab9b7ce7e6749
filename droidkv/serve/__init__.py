"""Serving: a store of KV and E that other processes can read, and what an engine needs of it."""

"""Transported recall on quarter turns: the claim and its memory."""

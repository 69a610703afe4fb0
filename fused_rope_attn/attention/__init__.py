"""Attention with rotary position embedding inside: padded and packed batches, forward and backward."""

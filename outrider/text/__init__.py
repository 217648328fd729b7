"""Text on both sides of the engine: prompts and chats to ids, committed ids back to text. Knows no tensors."""

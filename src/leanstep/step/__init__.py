"""What one training step is, what state it touches, what it computes, and what it takes."""

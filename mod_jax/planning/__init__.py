"""What a program would cost on hardware that nobody here owns: compiled for it, read, estimated."""

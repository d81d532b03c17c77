"""What a trained router does, in numbers (`routing_stats`) and in pictures (`plots`)."""

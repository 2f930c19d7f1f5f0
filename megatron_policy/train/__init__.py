"""What is done with a built model: training steps, log-probabilities, generation; knows nothing of
checkpoints or Ray.
"""

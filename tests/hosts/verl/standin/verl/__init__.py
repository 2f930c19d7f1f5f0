"""As much of verl as the tests need where it is not installed."""

"""What the evaluation scripts say when they cannot go on."""


class EvalError(Exception):
    """Something in the arguments, the data or the model does not do; the message says what, and the remedy."""

"""How far predictions are off: for doctor and tune."""


def predicted_by_measured(predicted: float, measured: float) -> float:
    """How many times what was measured was predicted; 1.1 promises 10 % too much."""
    return predicted / measured if measured else 0.0

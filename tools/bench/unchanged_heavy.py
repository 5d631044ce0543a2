"""`unchanged.py`, which imports pandas and scikit-learn as well, before anything else is done."""

import time

import pandas as pd  # noqa: F401
import sklearn.ensemble
import sklearn.linear_model
import sklearn.pipeline  # noqa: F401
import unchanged  # first of all, for the time of the first line

unchanged.imported = time.monotonic()

if __name__ == "__main__":
    unchanged.main()

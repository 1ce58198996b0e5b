"""The check of written files: loads and runs them, compares their outputs, and measures their speed.

===================  ===================================================================================================
``checking.py``      the ONNX files of one save, one after the other
``running.py``       a model as a user's program loads it; costliest nodes; the median time of several models
``losses.py``        what a file is compared with, how much worse it may be, and what is said about it
``batch.py``         the batches: kept while a calibration runs, read beside the record, or random numbers
``integers.py``      a deploy file in standard integer operators
``causes.py``        the first tensor at which a file is worse; tensors of a fast QDQ file that had better stay float
``child.py``         files of large models, in a process of their own
===================  ===================================================================================================
"""

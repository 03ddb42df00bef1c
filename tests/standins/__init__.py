"""Servers that behave as TensorRT-LLM, TGI and SGLang do, for tests on machines that can run none of them.

They speak the engines' protocols, check their arguments as strictly, print their log lines and fail in their ways;
what they generate means nothing, and their times are invented. `install.py` puts executables of the engines' names
into a folder; `faults.py` lists the failures that a test can ask for.
"""

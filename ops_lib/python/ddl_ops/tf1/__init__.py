"""TensorFlow 1 compatibility: `import tensorflow` gives the 1.x API on today's TensorFlow.

``importing`` catches the import, ``facade`` is what the script then gets, ``gone`` says what cannot
be had and what to use instead, and ``overlay`` holds the parts of TensorFlow 1 that have left it:
a file there is a module of ``tensorflow``. Importing this package imports nothing else.
"""

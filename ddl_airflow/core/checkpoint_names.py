"""How files of checkpoints are called, whoever has written them."""

from __future__ import annotations

import re

# Files of checkpoints: of TensorFlow's, ``checkpoint`` is the last that is written.
CHECKPOINT = re.compile(
    r"(?:.*/)?(?:checkpoint|.*\.(?:index|meta|keras|h5|hdf5|npz|ckpt)|.*\.data-\d+-of-\d+)"
)
# Half-written, by TensorFlow and by ours; and what no object can be called.
LEFT_OUT = re.compile(
    r"(?:.*/)?(?:\..*|.*\.tempstate\d*|.*_temp/.*)|.*[\0-\x1f\x7f\ud800-\udfff].*"
)
EVENTS = "events.out.tfevents"  # which grow

"""What is hooked once communication has started, so that ranks that train apart are known."""

from __future__ import annotations

import sys

from ddl_ops import gradients, written_files
from ddl_ops.environment import PLACEMENT


def look_after_training() -> None:
    """Ranks that do not average are warned of, where Keras says so, and known at the end.

    Keras compiles no model by XLA, which has none of our ops, unless the script asks for it, and
    its synchronized batch normalization is that of the ranks.

    May be called again, once the script has imported Keras.
    """
    gradients.note_gradients()
    # In TensorFlow 1 mode `import keras` gives Keras 2, of which nothing is hooked.
    keras_3 = getattr(sys.modules.get("keras"), "__version__", "").startswith("3.")
    if PLACEMENT.size > 1 and keras_3:
        from ddl_ops.keras_optimizer import notice_training_apart

        notice_training_apart()
    if PLACEMENT.size > 1:
        written_files.tell_of_c_code()
    if keras_3:
        from ddl_ops.batch_moments import hook_batch_normalization
        from ddl_ops.keras_optimizer import hook_compile
        from ddl_ops.keras_weight_notes import hook_fit

        hook_compile()
        hook_fit()
        hook_batch_normalization()

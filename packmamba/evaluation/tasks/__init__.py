"""Tasks with a right answer; they lie in ``packmamba.data.tasks``, whose examples train, too."""

from packmamba.data.tasks import TASKS as TASKS

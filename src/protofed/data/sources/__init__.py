"""Where the images of tasks come from: one module for each published task, and folders.

To add a published task, copy the module of one that is like it and add it to ``PUBLISHED``.
"""

from protofed.data.sources import digits, office_caltech, pacs, vlcs
from protofed.data.sources.published import PublishedTask

PUBLISHED: dict[str, PublishedTask] = {
    task.info.name: task for task in (digits.TASK, office_caltech.TASK, pacs.TASK, vlcs.TASK)
}
"""The published tasks by name."""

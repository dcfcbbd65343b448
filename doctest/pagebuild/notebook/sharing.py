"""One run for two languages: a translation with the same code takes over the outputs of its original."""

from nbformat import NotebookNode


def with_outputs_of(original: NotebookNode, translation: NotebookNode) -> NotebookNode:
    """The translation with the outputs of the original's cells, which hold the same code in the same order.

    Args:
        original: An executed notebook.
        translation: One that has not been executed; it is changed.
    """
    ours = [cell for cell in original.cells if cell.cell_type == "code"]
    theirs = [cell for cell in translation.cells if cell.cell_type == "code"]
    for one, other in zip(ours, theirs, strict=True):
        other.outputs, other.execution_count = one.outputs, one.execution_count
    translation.metadata.language_info = original.metadata.language_info
    return translation

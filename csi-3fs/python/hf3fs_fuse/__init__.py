"""Modules of 3FS under the names by which inference engines import them."""

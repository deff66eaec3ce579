"""Explanations: `pending_reasons` of waiting jobs, `pending_writer` stores them, `remedies`."""

"""Validation of objects as kube-apiserver does it: schemas, CEL rules, metadata and pods."""

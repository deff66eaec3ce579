"""Pods of gangs: template checks, creation, start monitoring and deletion."""

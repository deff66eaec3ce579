"""Settings of `flyer-webhook`: flags, and environment variables of the same names (FLYER_…)."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from flyer.kube.settings import add_flags, check_log_level

__all__ = ["WebhookSettings", "parse_webhook_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """Each field is a flag: `--metrics-port`, FLYER_METRICS_PORT."""

    namespace: str = "fireflyer-system"
    """The operator's namespace, in which nothing is injected."""
    host: str = ""
    """Address to listen on; empty: all IPv4 and IPv6 addresses."""
    port: int = 9443
    metrics_port: int = 8080
    certificates_folder: str = "/etc/flyer/certificates"
    """`ca.crt`, `tls.crt` and `tls.key`, as the operator keeps them in its Secret."""
    client_ca_file: str = ""
    """Authority of the API server's client certificate; empty: none is required."""
    log_level: str = "info"
    sidecar_image: str = "fireflyer/controller"
    collectives_image: str = "fireflyer/collectives"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: str = ""
    """Comma-separated names."""


def parse_webhook_settings(
    arguments: list[str] | None = None, env: dict[str, str] | None = None
) -> WebhookSettings:
    """Parse the command line; missing flags are read from the environment."""
    parser = argparse.ArgumentParser(
        prog="flyer-webhook",
        description="Serves the injection webhook. Each flag can also be given as an environment "
        "variable: --metrics-port as FLYER_METRICS_PORT.",
    )
    add_flags(parser, WebhookSettings, dict(os.environ) if env is None else env)
    settings = WebhookSettings(**vars(parser.parse_args(arguments)))
    check_log_level(parser, settings.log_level)
    return settings

"""The certificates' Secret: created, kept, renewed, and replaced without an effect on pods."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from flyer.kube.gateway import certificates_of, renewed
from flyer.kube.gateway.certificates import renewed_webhook

if TYPE_CHECKING:
    from collections.abc import Mapping

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ["flyer-gateway.fireflyer-system.svc", "10.0.0.7"]


def leaf(data: Mapping[str, bytes]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(data["tls.crt"])


def trusted(data: Mapping[str, bytes], bundle: str) -> bool:
    """Whether a pod with this `bundle` trusts the served certificate."""
    for authority in x509.load_pem_x509_certificates(bundle.encode()):
        try:
            leaf(data).verify_directly_issued_by(authority)
        except Exception:
            continue
        return True
    return False


def test_certificates_are_created_once_and_kept() -> None:
    data = renewed(None, NAMES, NOW)
    assert renewed(data, NAMES, NOW) == data
    assert renewed(data, NAMES, NOW + timedelta(days=59)) == data
    alternative_names = (
        leaf(data).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    )
    assert alternative_names.get_values_for_type(x509.DNSName) == NAMES[:1]
    assert alternative_names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.7")
    ]
    assert "PRIVATE" not in repr(certificates_of(data))


def test_an_empty_secret_is_filled() -> None:
    data = renewed({}, NAMES, NOW)
    assert trusted(data, certificates_of(data).bundle)


def test_a_leaf_that_ends_soon_or_has_other_names_is_replaced_under_the_same_authority() -> None:
    data = renewed(None, NAMES, NOW)
    for again in (
        renewed(data, NAMES, NOW + timedelta(days=61)),
        renewed(data, ["elsewhere"], NOW),
    ):
        assert again["tls.crt"] != data["tls.crt"]
        assert again["ca.crt"] == data["ca.crt"]
        assert trusted(again, certificates_of(data).bundle)


def test_over_twenty_years_no_pod_of_the_last_eleven_months_loses_trust() -> None:
    data, bundles = renewed(None, NAMES, NOW), []
    now = NOW
    authorities = {data["authority.crt"]}
    while now < NOW + timedelta(days=20 * 365):
        data = renewed(data, NAMES, now)
        authorities.add(data["authority.crt"])
        assert leaf(data).not_valid_after_utc > now
        bundles.append((now, certificates_of(data).bundle))
        bundles = [bundle for bundle in bundles if bundle[0] > now - timedelta(days=330)]
        assert all(trusted(data, bundle) for _, bundle in bundles), now
        now += timedelta(days=20)
    assert len(authorities) >= 3


@pytest.mark.parametrize("key", ["tls.crt", "tls.key", "authority.crt", "authority.key", "ca.crt"])
@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_certificates_are_replaced(key: str, damage: bytes | None) -> None:
    data = renewed(None, NAMES, NOW)
    damaged = dict(data)
    if damage is None:
        del damaged[key]
    else:
        damaged[key] = damage
    again = renewed(damaged, NAMES, NOW)
    assert trusted(again, certificates_of(again).bundle)
    assert renewed(again, NAMES, NOW) == again


def test_a_key_of_another_certificate_is_detected() -> None:
    data, other = renewed(None, NAMES, NOW), renewed(None, NAMES, NOW)
    again = renewed({**data, "tls.key": other["tls.key"]}, NAMES, NOW)
    assert again["tls.key"] not in (data["tls.key"], other["tls.key"])
    assert again["authority.crt"] == data["authority.crt"]


WEBHOOK = ["flyer-webhook.fireflyer-system.svc"]


def test_the_webhook_has_a_leaf_for_its_own_names_and_no_other_key() -> None:
    data = renewed(None, NAMES, NOW)
    webhook = renewed_webhook(data, {}, WEBHOOK, NOW)
    assert webhook.keys() == {"ca.crt", "tls.crt", "tls.key"}
    assert webhook["tls.key"] != data["tls.key"]
    assert trusted(webhook, certificates_of(data).bundle)
    alternative_names = (
        leaf(webhook).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    )
    assert alternative_names.get_values_for_type(x509.DNSName) == WEBHOOK
    assert renewed_webhook(data, webhook, WEBHOOK, NOW) == webhook


def test_the_webhooks_leaf_follows_time_and_authorities() -> None:
    data = renewed(None, NAMES, NOW)
    webhook = renewed_webhook(data, {}, WEBHOOK, NOW)
    later = renewed_webhook(data, webhook, WEBHOOK, NOW + timedelta(days=61))
    assert later["tls.crt"] != webhook["tls.crt"]
    other = renewed(None, NAMES, NOW)
    moved = renewed_webhook(other, webhook, WEBHOOK, NOW)
    assert moved["ca.crt"] == other["ca.crt"]
    assert trusted(moved, certificates_of(other).bundle)
    # Other keys from an installer or an earlier version are removed.
    assert renewed_webhook(data, {**webhook, "authority.key": b"x"}, WEBHOOK, NOW) == webhook
    with pytest.raises(ValueError, match="renew it first"):
        renewed_webhook({}, webhook, WEBHOOK, NOW)

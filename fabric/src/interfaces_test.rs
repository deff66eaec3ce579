//! Address selection on artificial nodes.

use super::*;
use proptest::prelude::*;

fn node_interfaces() -> Vec<Interface> {
    [
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth1", "fd00::5"),
        ("eth0", "10.0.0.5"),
        ("ib0", "10.100.0.5"),
        ("ib1", "10.100.1.5"),
    ]
    .map(|(name, address)| Interface {
        name: name.into(),
        address: address.parse().unwrap(),
        loopback: name == "lo",
    })
    .into()
}

fn names(selector: &str, route: Option<&str>) -> Vec<String> {
    let selector = AddressSelector::try_from(selector.to_owned()).unwrap();
    let route = route.map(|route| route.parse().unwrap());
    let interfaces = selector.select(&node_interfaces(), route).unwrap();
    interfaces.into_iter().map(|interface| interface.name).collect()
}

#[test]
fn the_default_route_is_first_and_addresses_shared_by_machines_are_last() {
    assert_eq!(names("", Some("10.100.1.5")), ["ib1", "eth0", "ib0", "eth1", "docker0"]);
    assert_eq!(names("", None), ["eth0", "ib0", "ib1", "eth1", "docker0"]);
    // A route over a bridge is a valid route.
    assert_eq!(names("", Some("172.17.0.1"))[0], "docker0");
    // A route to this node itself is ignored.
    assert_eq!(names("", Some("127.0.0.1")), names("", None));
}

#[test]
fn named_interfaces_are_used_in_the_order_of_the_names() {
    for (selector, expected) in [
        ("eth0", &["eth0"][..]),
        ("10.0.0.5", &["eth0"]),
        ("ib*, eth0", &["ib0", "ib1", "eth0"]),
        ("ib?,ib0,10.100.0.5", &["ib0", "ib1"]),
        ("10.100.0.0/16", &["ib0", "ib1"]),
        ("10.100.0.0/24,10.0.0.0/8", &["ib0", "eth0", "ib1"]),
        ("fd00::/8", &["eth1"]),
        ("0.0.0.0/0,!lo,!docker*", &["eth0", "ib0", "ib1"]),
        ("!docker0,!ib*", &["eth0", "eth1"]),
        ("!172.16.0.0/12,!fd00::5", &["eth0", "ib0", "ib1"]),
        ("lo", &["lo"]),
    ] {
        assert_eq!(names(selector, None), expected, "{selector}");
    }
    assert_eq!(names("ib*,eth0", Some("10.100.1.5")), ["ib1", "ib0", "eth0"]);
}

#[test]
fn a_loopback_address_is_used_unchanged() {
    assert_eq!(names("lo,!::1", None), ["lo"]);
    let selector: AddressSelector = "127.0.0.7".parse().unwrap();
    let interfaces = selector.select(&node_interfaces(), None).unwrap();
    assert_eq!(interfaces[0].to_string(), "lo 127.0.0.7");
}

#[test]
fn a_machine_with_only_loopback_uses_it() {
    let selector = AddressSelector::default();
    assert_eq!(selector.select(&node_interfaces()[..1], None).unwrap(), node_interfaces()[..1]);
    assert_eq!(selector.select(&[], None).unwrap(), []);
}

#[test]
fn a_selector_without_a_match_is_an_error_that_lists_the_interfaces() {
    for selector in ["ib9", "192.168.0.0/16", "10.0.0.6", "ib0,!ib*", "!*"] {
        let error = selector
            .parse::<AddressSelector>()
            .unwrap()
            .select(&node_interfaces(), None)
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(&format!("`{selector}`")) && text.contains("ib1 10.100.1.5"),
            "{text}"
        );
    }
}

#[test]
fn invalid_selectors_are_refused() {
    for text in [
        ",",
        "eth0,",
        "!",
        "10.0.0.0/33",
        "10.0.0/8",
        "a b",
        "eth0/24",
        "!!eth0",
        "a234567890123456",
    ] {
        assert!(text.parse::<AddressSelector>().is_err(), "{text}");
    }
}

#[test]
fn this_machine_has_interfaces_and_routes_end_at_one_of_them() {
    let here = interfaces();
    assert!(here.iter().any(|one| one.loopback), "{here:?}");
    // No process can listen at an address of another node or at one that was parsed incorrectly; an
    // address that was removed meanwhile is not listed again.
    for interface in here.iter().filter(|interface| interface.address.is_ipv4()) {
        let listens = std::net::TcpListener::bind((interface.address, 0)).is_ok();
        assert!(listens || !interfaces().contains(interface), "{interface}");
    }
    if let Some(source) = source_towards(None) {
        assert!(here.iter().any(|one| one.address == source), "{source} in {here:?}");
    }
    // This node itself: the same as the default route.
    assert_eq!(source_towards(Some("127.0.0.1")), source_towards(None));
}

proptest! {
    #[test]
    fn any_text_is_refused_or_survives_a_round_trip(text in "[!a-z0-9*?./:, ]{0,24}") {
        if let Ok(selector) = text.parse::<AddressSelector>() {
            prop_assert_eq!(selector.to_string().parse::<AddressSelector>().unwrap(), selector.clone());
            let _ = selector.select(&node_interfaces(), None);
        }
    }
}

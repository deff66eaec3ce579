//! Descriptor limits, lowered in separate test processes.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::process::Command;

use fabric::descriptors::reserve;
use rustix::process::{Resource, getrlimit};

const CHILD: &str = "FABRIC_TEST_DESCRIPTORS";

/// True in a process that has these limits; otherwise runs the test in such a process.
fn is_limited(test: &str, soft: u32, hard: u32) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let child = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -Sn {soft}; ulimit -Hn {hard}; exec \"$0\" \"$@\""))
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && output.contains("1 passed"), "{output}");
    false
}

fn soft() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap()
}

#[test]
fn the_soft_limit_is_raised_as_far_as_needed() {
    if !is_limited("the_soft_limit_is_raised_as_far_as_needed", 64, 4000) {
        return;
    }
    assert_eq!(soft(), 64);
    let small = reserve(10, "a small group").unwrap();
    assert_eq!(soft(), 64);
    let first = reserve(500, "a group").unwrap();
    assert!((510..600).contains(&soft()), "{}", soft());
    // Reservations count whether their descriptors are open or not; dropped ones do not count.
    let second = reserve(500, "a group").unwrap();
    let both = soft();
    assert!((1010..1100).contains(&both), "{both}");
    drop((small, first, second));
    drop(reserve(1000, "a group").unwrap());
    assert!(soft() < both + 100, "{}", soft());
    // The hard limit caps it while it leaves room for the request.
    let _most = [reserve(3000, "a group").unwrap(), reserve(3000, "a group").unwrap()];
    assert_eq!(soft(), 4000);
}

#[test]
fn a_hard_limit_that_is_too_low_is_named_with_the_remedy() {
    if !is_limited("a_hard_limit_that_is_too_low_is_named_with_the_remedy", 64, 200) {
        return;
    }
    let text = reserve(2046, "a group of 1024 ranks").unwrap_err().to_string();
    let expected =
        ["a group of 1024 ranks needs 20", "limit is 200", "ulimit -n 20", "LimitNOFILE"];
    assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(soft(), 64);
    // A failed reservation is not counted.
    let _fits = reserve(100, "a group").unwrap();
    assert!(soft() < 200, "{}", soft());
}

//! The tests named in docs/concepts/storage-semantics.md exist.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

#[test]
fn every_guarantee_has_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let text = std::fs::read_to_string(root.join("docs/concepts/storage-semantics.md")).unwrap();
    let promises: Vec<&str> = text.split("\n**S").skip(1).collect();
    assert!(promises.len() >= 11, "{}", promises.len());
    for (number, promise) in (1..).zip(promises) {
        assert!(promise.starts_with(&format!("{number}. ")), "S{number} is out of order");
        let tests = promise.split_once("\nTests: ").map_or("", |(_, tests)| tests);
        let tests_of_promise: Vec<&str> =
            tests.split('`').filter(|part| part.contains(".rs: ")).collect();
        assert!(!tests_of_promise.is_empty(), "S{number} names no test");
        for name in tests_of_promise {
            let (file, test) = name.split_once(": ").unwrap();
            let source = std::fs::read_to_string(root.join("csi-3fs/crates").join(file))
                .unwrap_or_else(|error| panic!("S{number}: {file}: {error}"));
            assert!(source.contains(&format!("fn {test}(")), "S{number}: no {test} in {file}");
        }
    }
}

//! Test support: mutations of valid byte strings and JSON documents, for property tests of parsers.
//!
//! Changes are values, so that proptest shrinks a failure to the relevant ones. Random bytes would fail the
//! first check of a parser; changed valid input passes it.

use proptest::prelude::*;
use serde_json::Value;

/// Configuration of a property with `usual` cases, times `FUZZ_TIMES` (default: 1).
pub fn cases(usual: u32) -> ProptestConfig {
    let times = std::env::var("FUZZ_TIMES").ok().and_then(|times| times.parse().ok());
    let cases = usual.saturating_mul(times.unwrap_or(1));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// One change of a byte string. Offsets wrap at the end.
#[derive(Clone, Debug)]
pub enum Change {
    /// Flip one bit.
    Flip(usize, u8),
    /// Replace a number of one, two, four or eight bytes.
    Number(usize, u8, u64),
    /// Truncate.
    Cut(usize),
    /// Remove a number of bytes.
    Remove(usize, usize),
    /// Repeat a number of bytes.
    Repeat(usize, usize),
    /// Insert these bytes.
    Insert(usize, Vec<u8>),
}

/// One to four changes.
pub fn changes() -> impl Strategy<Value = Vec<Change>> {
    let at = 0..4096_usize;
    let change = prop_oneof![
        (at.clone(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at.clone(), 0..4_u8, number()).prop_map(|(at, size, to)| Change::Number(at, size, to)),
        at.clone().prop_map(Change::Cut),
        (at.clone(), 1..80_usize).prop_map(|(at, bytes)| Change::Remove(at, bytes)),
        (at.clone(), 1..80_usize).prop_map(|(at, bytes)| Change::Repeat(at, bytes)),
        (at, prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Change::Insert(at, bytes)),
    ];
    prop::collection::vec(change, 1..5)
}

/// Boundary values of lengths and counts.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..4_u64,
        any::<u64>(),
        (0..64_u32, -2..3_i64).prop_map(|(bits, off)| (1_u64 << bits).wrapping_add_signed(off)),
        Just(u64::MAX),
    ]
}

/// Applies the changes to `bytes`.
pub fn changed(bytes: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for change in changes {
        let length = bytes.len().max(1);
        match change {
            Change::Insert(at, more) => {
                let at = at % length;
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), more.iter().copied());
            }
            _ if bytes.is_empty() => {}
            Change::Flip(at, bit) => bytes[at % length] ^= 1 << bit,
            Change::Number(at, size, to) => {
                let places = bytes[at % length..].iter_mut();
                for (place, byte) in places.zip(to.to_le_bytes().into_iter().take(1 << size)) {
                    *place = byte;
                }
            }
            Change::Cut(at) => bytes.truncate(at % length),
            Change::Remove(at, count) => {
                let at = at % length;
                bytes.drain(at..(at + count).min(length));
            }
            Change::Repeat(at, count) => {
                let at = at % length;
                let repeated = bytes[at..(at + count).min(length)].to_vec();
                bytes.splice(at..at, repeated);
            }
        }
    }
    bytes
}

/// One change of a document: a path (one number for each level) and the change.
#[derive(Clone, Debug)]
pub struct Edit {
    path: Vec<usize>,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    Replace(Value),
    Remove,
    Twice,
}

/// One or more changes of a document.
pub fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let odd = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        number().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(Value::from("x".repeat(5000))),
        Just(Value::Array(vec![])),
        Just(serde_json::json!({})),
        (0..200_usize).prop_map(|deep| (0..deep).fold(Value::Null, |inner, _| [inner].into())),
    ];
    let how = prop_oneof![
        4 => odd.prop_map(How::Replace),
        1 => Just(How::Remove),
        1 => Just(How::Twice),
    ];
    let edit =
        (prop::collection::vec(0..64_usize, 1..5), how).prop_map(|(path, how)| Edit { path, how });
    prop::collection::vec(edit, 1..4)
}

/// Applies the changes to `document`; returns its text.
pub fn edited(document: &Value, edits: &[Edit]) -> String {
    let mut document = document.clone();
    for edit in edits {
        apply(&mut document, &edit.path, &edit.how);
    }
    document.to_string()
}

fn apply(value: &mut Value, path: &[usize], how: &How) {
    let (at, rest) = match path {
        [] => return replace(value, how),
        [at, rest @ ..] => (at, rest),
    };
    match value {
        Value::Array(list) if !list.is_empty() => {
            let at = at % list.len();
            match (rest, how) {
                ([], How::Remove) => drop(list.remove(at)),
                ([], How::Twice) => list.insert(at, list[at].clone()),
                _ => apply(&mut list[at], rest, how),
            }
        }
        Value::Object(fields) if !fields.is_empty() => {
            let name = fields.keys().nth(at % fields.len()).cloned().unwrap_or_default();
            match (rest, how) {
                ([], How::Remove) => drop(fields.remove(&name)),
                _ => apply(&mut fields[&name], rest, how),
            }
        }
        other => replace(other, how),
    }
}

fn replace(value: &mut Value, how: &How) {
    match how {
        How::Replace(odd) => *value = odd.clone(),
        How::Remove => *value = Value::Null,
        How::Twice => *value = [value.clone(), value.clone()].into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_apply_to_inputs_of_every_length() {
        let all = [
            Change::Insert(1, vec![9, 9]),
            Change::Flip(0, 3),
            Change::Number(100, 3, u64::MAX),
            Change::Repeat(5, 50),
            Change::Remove(2, 2),
            Change::Cut(3),
        ];
        assert_eq!(changed(&[1, 2, 3], &all[..2]), [9, 9, 9, 2, 3]);
        for bytes in [&[][..], &[1], &[1, 2, 3]] {
            let _ = changed(bytes, &all);
        }
    }

    proptest! {
        #![proptest_config(cases(64))]
        #[test]
        fn edited_documents_are_valid_json(edits in edits()) {
            let document = serde_json::json!({"a": [1, {"b": null}], "c": "text"});
            let text = edited(&document, &edits);
            // The parser refuses excessive depth; any other document can be read back.
            if let Err(error) = serde_json::from_str::<Value>(&text) {
                prop_assert!(error.to_string().contains("recursion limit"), "{error}");
            }
        }
    }
}

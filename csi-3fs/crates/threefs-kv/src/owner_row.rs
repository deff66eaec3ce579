//! Bytes of the owner's row. Pure.

use std::collections::BTreeSet;
use std::fmt;

use fabric::auth::keys::KeyRing;

/// Purpose of the fingerprints; a change of it makes every store foreign.
const PURPOSE: &str = "owner of a 3fs store";
const FORMAT: u8 = 1;
const FINGERPRINT_BYTES: usize = 32;

/// HMAC of a constant with a key of a cluster: recognizes the key, which cannot be computed from it.
/// Displayed as its first eight digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; FINGERPRINT_BYTES]);

/// Fingerprints of a key ring.
pub type Fingerprints = BTreeSet<Fingerprint>;

impl Fingerprint {
    pub(crate) fn of(keys: &KeyRing) -> Fingerprints {
        keys.fingerprints(PURPOSE).into_iter().map(Self).collect()
    }

    /// A list for messages.
    pub fn list(keys: &Fingerprints) -> String {
        keys.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The format, and the fingerprints in order.
pub(crate) fn encode(keys: &Fingerprints) -> Vec<u8> {
    let mut row = vec![FORMAT];
    row.extend(keys.iter().flat_map(|key| key.0));
    row
}

/// The fingerprints, at least one.
///
/// # Errors
/// What is wrong with the row.
pub(crate) fn decode(row: &[u8]) -> Result<Fingerprints, String> {
    let (format, keys) = row.split_first().ok_or("it is empty")?;
    if *format != FORMAT {
        return Err(format!("its format is {format}, this program knows {FORMAT}"));
    }
    let (keys, rest) = keys.as_chunks::<FINGERPRINT_BYTES>();
    if keys.is_empty() || !rest.is_empty() || !keys.is_sorted_by(|one, next| one < next) {
        return Err(format!("its {} bytes are not a list of fingerprints", row.len()));
    }
    Ok(keys.iter().copied().map(Fingerprint).collect())
}

#[cfg(test)]
mod tests {
    use fabric::auth::Key;

    use super::*;

    fn keys(texts: &[&str]) -> Fingerprints {
        let of =
            |text: &&str| Fingerprint::of(&KeyRing::of(Key::from_bytes(text.as_bytes()).unwrap()));
        texts.iter().flat_map(of).collect()
    }

    #[test]
    fn a_row_has_the_fingerprints_of_its_keys_and_not_the_keys() {
        let both = keys(&["the first key 0123456789", "the second key 0123456789"]);
        assert_eq!(both.len(), 2);
        let row = encode(&both);
        assert_eq!(decode(&row).unwrap(), both);
        assert!(
            !row.windows(5)
                .any(|bytes| b"the first key 0123456789".windows(5).any(|it| it == bytes))
        );
        // Stores have rows with these values.
        let known = keys(&["a key that must not change"]);
        assert_eq!(Fingerprint::list(&known), "6f843cd1");
    }

    #[test]
    fn a_row_that_is_not_a_list_of_fingerprints_is_invalid() {
        let row = encode(&keys(&["the first key 0123456789", "the second key 0123456789"]));
        let swapped = [&row[..1], &row[33..], &row[1..33]].concat();
        let twice = [&row[..33], &row[1..33]].concat();
        let invalid: [&[u8]; 7] =
            [b"", &row[..1], &row[..64], &[&row[..], b"x"].concat(), &swapped, &twice, b"garbage"];
        for row in invalid {
            assert!(decode(row).is_err(), "{row:?}");
        }
        assert!(decode(b"garbage").unwrap_err().contains("its format is 103"));
    }
}

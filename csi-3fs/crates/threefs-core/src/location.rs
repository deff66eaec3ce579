//! Location of a storage node in the failure domains of the cluster: `ZONE/RACK/HOST`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest part, as of a value of a Kubernetes label.
const PART_BYTES_MAX: usize = 63;
/// Longest host: node names of Kubernetes are DNS names.
const HOST_BYTES_MAX: usize = 253;

/// A level of failure domains, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Nodes that share a building, a network or a power supply.
    Zone,
    /// Nodes that share a rack.
    Rack,
    /// Storage services on one machine.
    Host,
}

impl Level {
    /// All levels, outermost first.
    pub const ALL: [Self; 3] = [Self::Zone, Self::Rack, Self::Host];
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zone => "zone",
            Self::Rack => "rack",
            Self::Host => "host",
        })
    }
}

/// Zone, rack and host of a node, separated by slashes. Empty parts are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Location(String);

impl Location {
    /// Joins the parts.
    ///
    /// # Errors
    /// [`InvalidLocation`], with the part.
    pub fn new(zone: &str, rack: &str, host: &str) -> Result<Self, InvalidLocation> {
        if [zone, rack, host].iter().all(|part| part.is_empty()) {
            return Ok(Self::default());
        }
        Self::try_from(format!("{zone}/{rack}/{host}"))
    }

    /// The part of a level; empty if unknown.
    #[must_use]
    pub fn part(&self, level: Level) -> &str {
        self.0.split('/').nth(level as usize).unwrap_or_default()
    }

    /// The domain at a level, with the outer parts that distinguish it from others; `None` if
    /// unknown.
    #[must_use]
    pub fn domain(&self, level: Level) -> Option<&str> {
        if self.part(level).is_empty() {
            return None;
        }
        let end = self.0.match_indices('/').nth(level as usize).map(|(index, _)| index);
        Some(&self.0[..end.unwrap_or(self.0.len())])
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.0
    }
}

impl TryFrom<String> for Location {
    type Error = InvalidLocation;

    fn try_from(text: String) -> Result<Self, InvalidLocation> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let valid =
            |(part, bytes_max): (&str, usize)| part.len() <= bytes_max && part.bytes().all(allowed);
        let maxima = [PART_BYTES_MAX, PART_BYTES_MAX, HOST_BYTES_MAX];
        let few = text.matches('/').count() < maxima.len();
        if few && text.split('/').zip(maxima).all(valid) {
            return Ok(Self(text));
        }
        // The text may come from a message: only its start is kept.
        Err(InvalidLocation(text.chars().take(80).collect()))
    }
}

/// A text that is not a location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid location `{0}`: expected ZONE/RACK/HOST, each of letters, digits, `-`, `_` and `.`, \
     for example A/r12/node-7; a part that is not known may be empty"
)]
pub struct InvalidLocation(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_includes_the_outer_parts() {
        let location = Location::new("A", "r1", "host-3").unwrap();
        assert_eq!(location.domain(Level::Zone), Some("A"));
        assert_eq!(location.domain(Level::Rack), Some("A/r1"));
        assert_eq!(location.domain(Level::Host), Some("A/r1/host-3"));
        let partial = Location::new("", "", "host-3").unwrap();
        assert_eq!(partial.domain(Level::Zone), None);
        assert_eq!(partial.domain(Level::Rack), None);
        assert_eq!(partial.domain(Level::Host), Some("//host-3"));
        let zone_only = Location::try_from("A".to_owned()).unwrap();
        assert_eq!(zone_only.domain(Level::Zone), Some("A"));
        assert_eq!(zone_only.domain(Level::Host), None);
        assert!(Level::ALL.iter().all(|level| Location::default().domain(*level).is_none()));
    }

    #[test]
    fn invalid_texts_are_refused_and_bounded() {
        for text in ["a/b/c/d", "a b", "ä", "a/\n/c", &"z".repeat(64), &"x".repeat(1 << 20)] {
            let error = Location::try_from(text.to_owned()).unwrap_err();
            assert!(error.to_string().len() < 400, "{error}");
            assert!(serde_json::from_value::<Location>(text.into()).is_err());
        }
        assert!(Location::new("a/b", "", "c").is_err());
    }

    /// Earlier releases stored a string in its place, which was always empty.
    #[test]
    fn it_is_encoded_as_a_string() {
        for text in ["", "A/r1/h"] {
            let location = Location::try_from(text.to_owned()).unwrap();
            let encoded = postcard::to_stdvec(&location).unwrap();
            assert_eq!(encoded, postcard::to_stdvec(text).unwrap());
            assert_eq!(postcard::from_bytes::<Location>(&encoded).unwrap(), location);
        }
    }
}

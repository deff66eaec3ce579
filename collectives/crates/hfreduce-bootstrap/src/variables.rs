//! Registry of environment variables: name, type, default and meaning of every `HFREDUCE_*` setting.
//!
//! The readers of the C and Python interfaces, their error messages and the settings table of the
//! documentation are made from it.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::time::Duration;

use hfreduce_engine::{NoPriority, Priority, STREAMS_MAX};

/// Type and range of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A path.
    Path,
    /// A path, or `off`.
    PathOrOff,
    /// A whole number in a range, both ends included.
    Integer(u64, u64),
    /// A positive number of seconds.
    Seconds,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A priority level.
    Priority,
    /// HOST:PORT.
    HostPort,
    /// Addresses, networks, interfaces and exclusions.
    Addresses,
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path => formatter.write_str("a path"),
            Self::PathOrOff => formatter.write_str("a path or off"),
            Self::Integer(min, max) => write!(formatter, "a whole number from {min} to {max}"),
            Self::Seconds => formatter.write_str("a number of seconds above 0"),
            Self::Choice(words) => formatter.write_str(&words.join(" or ")),
            Self::Priority => NoPriority.fmt(formatter),
            Self::HostPort => formatter.write_str("HOST:PORT, for example 10.0.0.1:29500"),
            Self::Addresses => formatter.write_str(
                "addresses (10.0.0.5), networks (10.0.0.0/8), interfaces (eth0, ib*) and \
                 exclusions (!docker0), separated by commas",
            ),
        }
    }
}

/// An environment variable.
#[derive(Debug)]
pub struct Variable {
    /// The name.
    pub name: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// The value in force when the variable is unset or empty.
    pub default: &'static str,
    /// The meaning.
    pub doc: &'static str,
    /// Anchor of the section of `docs/concepts/collectives.md` with details.
    pub section: Option<&'static str>,
}

/// An invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?}: expected {expected}")]
pub struct SettingError {
    /// The variable or field.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What it should be.
    pub expected: String,
}

impl SettingError {
    /// `name` has a value other than the expected.
    pub fn new(name: &'static str, value: &str, expected: impl fmt::Display) -> Self {
        Self { name, value: value.to_owned(), expected: expected.to_string() }
    }
}

macro_rules! variables {
    ($($(#[details = $section:literal])? $name:ident: $kind:expr, default $default:literal, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            pub static $name: Variable = Variable {
                name: concat!("HFREDUCE_", stringify!($name)),
                kind: $kind,
                default: $default,
                doc: $doc,
                section: [$(Some($section),)? None][0],
            };
        )*
        /// All variables in alphabetical order.
        pub static ALL: &[&Variable] = &[$(&$name),*];
    };
}

variables! {
    #[details = "which-network"]
    ADDRESS: Kind::Addresses, default "the address on the route to rank 0, then the others",
        "Addresses at which other nodes reach this node, best first.";
    CHUNK_BYTES: Kind::Integer(4096, 16 << 20), default "chosen by the engine",
        "Size of a reduce chunk in bytes.";
    CONNECT_SECONDS: Kind::Seconds, default "120, or the timeout of the group if that is shorter",
        "Time for which ranks wait for each other at startup.";
    CUDA_LIBRARY: Kind::Path, default "libcuda.so.1",
        "CUDA driver library, used for GPU tensors.";
    #[details = "a-daemon-for-the-ranks-of-a-machine"]
    DAEMON: Kind::Path, default "none: every rank runs its own threads",
        "Socket of the hfreduced that serves the ranks of this node.";
    #[details = "which-bits-come-out"]
    DETERMINISM: Kind::Choice(&["default", "stable", "wide", "stable,wide"]), default "default",
        "stable: bits do not depend on buckets. wide: partial sums of 16- and 8-bit types are not rounded.";
    DUMP_DIR: Kind::Path, default "hfreduce-UID/dumps in the temporary folder",
        "Folder for the flight records written when an error ends a group.";
    GDRCOPY: Kind::PathOrOff, default "libgdrapi.so.2 if installed",
        "GDRCopy library, used for small GPU tensors.";
    ISA: Kind::Choice(&["scalar", "avx2", "avx512"]), default "the widest of the processor",
        "Widest instruction set to use.";
    KEY_FILE: Kind::Path, default "rank 0 creates a key and distributes it through torch's store",
        "File with the key that authenticates the ranks of a job: 16 to 4096 bytes.";
    LIVENESS_SECONDS: Kind::Seconds, default "10",
        "Silence after which a peer counts as stalled; 0.7 detects it within a second, where no node is ever busy for that long.";
    PINNED_BYTES: Kind::Integer(1 << 20, 1 << 40), default "1 GiB",
        "Maximum pinned memory of one GPU, in bytes.";
    #[details = "which-group-goes-first"]
    PRIORITY: Kind::Priority, default "normal",
        "Priority of the chunks of a group among the groups of a process.";
    REGISTERED_BYTES: Kind::Integer(0, 1 << 46),
        default "the memory of the node, at most 256 GiB; 0 where address space is limited",
        "Maximum registered memory of one rank, in bytes.";
    RENDEZVOUS: Kind::HostPort, default "MASTER_ADDR:MASTER_PORT",
        "Address at which rank 0 listens, for programs without torch.";
    RUN_DIR: Kind::Path,
        default "hfreduce in XDG_RUNTIME_DIR, else hfreduce-UID in /dev/shm or /tmp",
        "Folder for the flight recorders of running ranks, which `hfreduce status` reads.";
    #[details = "how-many-connections"]
    STREAMS: Kind::Integer(1, STREAMS_MAX as u64), default "2",
        "TCP streams between two neighboring nodes; the same on all ranks.";
    TRANSPORT: Kind::Choice(&["auto", "tcp"]), default "auto",
        "auto: nodes on one machine share memory, others use TCP. tcp: always TCP.";
}

/// Environment, empty values counting as unset.
pub(crate) struct Environment<G>(pub(crate) G);

impl<G: Fn(&str) -> Option<String>> Environment<G> {
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    /// Refuses every value that does not match the type of its variable, where the type alone
    /// decides.
    pub(crate) fn check(&self) -> Result<(), SettingError> {
        for variable in ALL {
            let Some(value) = self.text(variable.name) else { continue };
            let valid = match variable.kind {
                Kind::Integer(min, max) => {
                    value.parse().is_ok_and(|number: u64| (min..=max).contains(&number))
                }
                Kind::Seconds => seconds(&value).is_some(),
                // `wide, stable` is `stable,wide`.
                Kind::Choice(_) if variable.name == DETERMINISM.name => {
                    value.parse::<hfreduce_engine::Determinism>().is_ok()
                }
                Kind::Choice(words) => words.contains(&value.as_str()),
                Kind::Priority => value.parse::<Priority>().is_ok(),
                Kind::Addresses => value.parse::<fabric::interfaces::AddressSelector>().is_ok(),
                Kind::Path | Kind::PathOrOff | Kind::HostPort => true,
            };
            if !valid {
                return Err(SettingError::new(variable.name, &value, variable.kind));
            }
        }
        Ok(())
    }

    /// A checked value; none if unset.
    pub(crate) fn parsed<T: FromStr>(&self, variable: &Variable) -> Option<T> {
        self.text(variable.name)?.parse().ok()
    }

    pub(crate) fn seconds(&self, variable: &Variable) -> Option<Duration> {
        seconds(&self.text(variable.name)?)
    }
}

fn seconds(text: &str) -> Option<Duration> {
    let time = Duration::try_from_secs_f64(text.parse().ok()?).ok()?;
    Some(time).filter(|time| !time.is_zero())
}

/// A warning if `name` starts like a setting and is none, most often because of a spelling mistake.
pub fn warning(name: &str) -> Option<String> {
    if !name.starts_with("HFREDUCE_") || ALL.iter().any(|variable| variable.name == name) {
        return None;
    }
    let nearest = ALL.iter().map(|variable| variable.name).min_by_key(|own| distance(own, name));
    let hint = match nearest.filter(|own| distance(own, name) <= 3) {
        Some(nearest) => format!("did you mean {nearest}?"),
        None => {
            let names: Vec<_> = ALL.iter().map(|variable| variable.name).collect();
            format!("known: {}", names.join(", "))
        }
    };
    Some(format!("{name} is not a setting of HFReduce; {hint}"))
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The settings table of the documentation, in Markdown.
pub fn table() -> String {
    let mut table = String::from("| variable | value | default | meaning |\n|---|---|---|---|\n");
    for Variable { name, kind, default, doc, section } in ALL {
        let details = section.map(|anchor| format!(" [Details](#{anchor})")).unwrap_or_default();
        let _ = writeln!(table, "| `{name}` | {kind} | {default} | {doc}{details} |");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested() {
        let warning = |name| warning(name).unwrap_or_default();
        assert!(warning("HFREDUCE_KEYFILE").ends_with("did you mean HFREDUCE_KEY_FILE?"));
        assert!(warning("HFREDUCE_COLOR").contains("known: HFREDUCE_ADDRESS, "));
        assert_eq!((warning("HFREDUCE_ISA"), warning("FLYER_ZONE")), Default::default());
    }

    #[test]
    fn the_documentation_has_the_table_of_this_registry() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/concepts/collectives.md");
        let text = std::fs::read_to_string(page).unwrap();
        let start = "<!-- settings: written from the registry in hfreduce-bootstrap -->\n\n";
        let (_, rest) = text.split_once(start).expect("the mark of the table");
        assert!(rest.starts_with(&table()), "replace the table in the page by:\n{}", table());
    }
}

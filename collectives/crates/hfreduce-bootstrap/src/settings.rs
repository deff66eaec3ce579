//! Where a group meets and as whom: from the environment, in torchrun's names and ours.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use fabric::interfaces::AddressSelector;
use hfreduce_engine::{Determinism, Priority, STREAMS_MAX};

const KEY_BYTES_MIN: usize = 16;
const KEY_BYTES_MAX: usize = 4096;
const CHUNK_BYTES: RangeInclusive<usize> = 4096..=16 << 20;
/// A rank that is alone proves nothing to anybody.
const KEY_OF_ONE: [u8; 32] = [0; 32];

/// Everything that a rank is told before it meets the others.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The job, for messages and proofs.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// How many ranks there are.
    pub world_size: u32,
    /// HOST:PORT at which rank 0 listens.
    pub rendezvous: String,
    /// What proves who belongs to the job.
    pub key: Vec<u8>,
    /// This machine's name; ranks with equal ones share its memory.
    pub node: String,
    /// Its network zone.
    pub zone: String,
    /// At which of its addresses other machines reach this one; by default all, best first.
    pub address: AddressSelector,
    /// The file with machines, zones and bridges; node and zone come from it then.
    pub topology: Option<PathBuf>,
    /// Bytes of one reduce chunk; otherwise the engine's.
    pub chunk_bytes: Option<usize>,
    /// How long ranks wait for each other.
    pub connect: Duration,
    /// Silence after which a peer counts as stalled.
    pub liveness: Duration,
    /// Nodes on one machine share memory instead of using TCP.
    pub peer_memory: bool,
    /// TCP streams between two neighboring nodes; otherwise the engine's.
    pub streams: Option<usize>,
    /// What is promised about bits, beyond the default.
    pub determinism: Determinism,
    /// Whose chunks go first, of the groups of a process.
    pub priority: Priority,
    /// The socket of the `hfreduced` that does it all, if one does.
    pub daemon: Option<PathBuf>,
}

/// A value that cannot be used.
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

impl Settings {
    /// The defaults for a rank.
    pub fn new(rank: u32, world_size: u32, rendezvous: &str, key: &[u8]) -> Self {
        Self {
            job: String::new(),
            rank,
            world_size,
            rendezvous: rendezvous.to_owned(),
            key: key.to_vec(),
            node: host_name(),
            zone: "default".to_owned(),
            address: AddressSelector::default(),
            topology: None,
            chunk_bytes: None,
            connect: Duration::from_secs(120),
            liveness: Duration::from_secs(10),
            peer_memory: true,
            streams: None,
            determinism: Determinism::DEFAULT,
            priority: Priority::Normal,
            daemon: None,
        }
    }

    /// From the environment that `get` looks into; empty values count as absent.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let text = |name: &str| get(name).filter(|value| !value.is_empty());
        let whole = |name: &'static str| {
            let value = text(name).unwrap_or_default();
            value.parse::<u32>().map_err(|_| wrong(name, &value, "a whole number"))
        };
        let (rank, world_size) = (whole("RANK")?, whole("WORLD_SIZE")?);
        if rank >= world_size {
            let expected = "a number below WORLD_SIZE, from 0 on";
            return Err(wrong("RANK", &rank.to_string(), expected));
        }
        let rendezvous = match text("HFREDUCE_RENDEZVOUS") {
            Some(own) => own,
            None => {
                let host = text("MASTER_ADDR").ok_or_else(|| {
                    wrong("MASTER_ADDR", "", "the host of rank 0, as launchers set it")
                })?;
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                format!("{host}:{}", whole("MASTER_PORT")?)
            }
        };
        let key = match text("HFREDUCE_KEY_FILE") {
            Some(path) => Self::key_in(&path)?,
            None if world_size == 1 => KEY_OF_ONE.to_vec(),
            None => {
                let expected = "a file that all ranks can read and nobody else, with 16 bytes or \
                                more: `head -c 32 /dev/urandom | base64 > key` makes one";
                return Err(wrong("HFREDUCE_KEY_FILE", "", expected));
            }
        };
        let mut settings = Self::new(rank, world_size, &rendezvous, &key);
        settings.job = text("FLYER_JOB").unwrap_or_default();
        settings.zone = text("FLYER_ZONE").unwrap_or(settings.zone);
        settings.topology = text("FLYER_TOPOLOGY").map(PathBuf::from);
        settings.daemon = text("HFREDUCE_DAEMON").map(PathBuf::from);
        if let Some(value) = text("HFREDUCE_ADDRESS") {
            settings.address = Self::wanted("HFREDUCE_ADDRESS", &value)?;
        }
        if let Some(value) = text("HFREDUCE_CHUNK_BYTES") {
            settings.chunk_bytes = Some(whole_within("HFREDUCE_CHUNK_BYTES", &value, CHUNK_BYTES)?);
        }
        if let Some(value) = text("HFREDUCE_REGISTERED_BYTES")
            && value.parse::<u64>().is_err()
        {
            // The engine reads it by itself.
            return Err(wrong("HFREDUCE_REGISTERED_BYTES", &value, "a whole number of bytes"));
        }
        for (name, place) in [
            ("HFREDUCE_CONNECT_SECONDS", &mut settings.connect),
            ("HFREDUCE_LIVENESS_SECONDS", &mut settings.liveness),
        ] {
            if let Some(value) = text(name) {
                *place = seconds(name, &value)?;
            }
        }
        settings.peer_memory = match text("HFREDUCE_TRANSPORT").as_deref() {
            None | Some("auto") => true,
            Some("tcp") => false,
            Some(other) => return Err(wrong("HFREDUCE_TRANSPORT", other, "auto or tcp")),
        };
        if let Some(value) = text("HFREDUCE_STREAMS") {
            settings.streams = Some(whole_within("HFREDUCE_STREAMS", &value, 1..=STREAMS_MAX)?);
        }
        if let Some(value) = text("HFREDUCE_DETERMINISM") {
            settings.determinism = Self::modes("HFREDUCE_DETERMINISM", &value)?;
        }
        if let Some(value) = text("HFREDUCE_PRIORITY") {
            let wrong = |expected| wrong("HFREDUCE_PRIORITY", &value, &format!("{expected}"));
            settings.priority = value.parse::<Priority>().map_err(wrong)?;
        }
        Ok(settings)
    }

    /// The addresses that a setting of this name asks for.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn wanted(name: &'static str, value: &str) -> Result<AddressSelector, SettingError> {
        let expected = "addresses (10.0.0.5), networks (10.0.0.0/8), interfaces (eth0, ib*) and \
                        exclusions (!docker0) with commas between them";
        value.parse().map_err(|_| wrong(name, value, expected))
    }

    /// What a setting of this name promises about bits.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn modes(name: &'static str, value: &str) -> Result<Determinism, SettingError> {
        value.parse::<Determinism>().map_err(|expected| wrong(name, value, &format!("{expected}")))
    }

    /// The key in a file; white space around it does not count.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn key_in(path: &str) -> Result<Vec<u8>, SettingError> {
        use std::io::Read;
        let mut key = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(KEY_BYTES_MAX as u64 + 1).read_to_end(&mut key));
        if let Err(error) = read {
            return Err(wrong("HFREDUCE_KEY_FILE", path, &format!("a file ({error})")));
        }
        let key = key.trim_ascii();
        if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len()) {
            let found = key.len();
            let expected = format!("{KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes, not {found}");
            return Err(wrong("HFREDUCE_KEY_FILE", path, &expected));
        }
        Ok(key.to_vec())
    }

    /// Host and port of the rendezvous.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn address_of_meeting(&self) -> Result<(String, u16), SettingError> {
        let parts = self.rendezvous.rsplit_once(':');
        let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        match parts {
            Some((host, port)) if !host.is_empty() => {
                Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
            }
            _ => Err(wrong("rendezvous", &self.rendezvous, "HOST:PORT, as 10.0.0.1:29500 is")),
        }
    }
}

fn whole_within(
    name: &'static str,
    value: &str,
    range: RangeInclusive<usize>,
) -> Result<usize, SettingError> {
    let number = value.parse().ok().filter(|number| range.contains(number));
    let (least, most) = (range.start(), range.end());
    number.ok_or_else(|| wrong(name, value, &format!("a whole number from {least} to {most}")))
}

fn seconds(name: &'static str, value: &str) -> Result<Duration, SettingError> {
    let number: f64 = value.parse().unwrap_or(f64::NAN);
    let time = Duration::try_from_secs_f64(number).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| wrong(name, value, "a number of seconds above 0"))
}

fn wrong(name: &'static str, value: &str, expected: &str) -> SettingError {
    SettingError { name, value: value.to_owned(), expected: expected.to_owned() }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, SettingError> {
        let get = |name: &str| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        Settings::read(get)
    }

    const ALONE: [(&str, &str); 3] =
        [("RANK", "0"), ("WORLD_SIZE", "1"), ("HFREDUCE_RENDEZVOUS", "[::1]:7")];

    #[test]
    fn the_environment_of_a_launcher_is_read() {
        let settings = read(&ALONE).unwrap();
        assert_eq!(settings.address_of_meeting().unwrap(), ("::1".to_owned(), 7));
        let key = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(key.path(), "  0123456789abcdef\n").unwrap();
        let settings = read(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a0"),
            ("MASTER_PORT", "29500"),
            ("HFREDUCE_KEY_FILE", key.path().to_str().unwrap()),
            ("HFREDUCE_LIVENESS_SECONDS", "2.5"),
            ("HFREDUCE_DETERMINISM", "wide,stable"),
            ("HFREDUCE_STREAMS", "8"),
            ("FLYER_ZONE", ""),
        ])
        .unwrap();
        assert_eq!(settings.rendezvous, "a0:29500");
        assert_eq!(settings.key, b"0123456789abcdef");
        assert_eq!(settings.liveness, Duration::from_millis(2500));
        assert_eq!(settings.zone, "default");
        assert_eq!(settings.streams, Some(8));
        assert_eq!(settings.determinism, Determinism { stable: true, wide: true });
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let two = [("RANK", "0"), ("WORLD_SIZE", "2"), ("HFREDUCE_RENDEZVOUS", "a:1")];
        for (name, pairs) in [
            ("RANK", vec![]),
            ("RANK", vec![("RANK", "2"), ("WORLD_SIZE", "2")]),
            ("MASTER_ADDR", vec![("RANK", "0"), ("WORLD_SIZE", "2")]),
            ("HFREDUCE_KEY_FILE", two.to_vec()),
            ("HFREDUCE_CHUNK_BYTES", [&ALONE[..], &[("HFREDUCE_CHUNK_BYTES", "1")]].concat()),
            ("HFREDUCE_ADDRESS", [&ALONE[..], &[("HFREDUCE_ADDRESS", "10.0.0/8")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "0")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "17")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "auto")]].concat()),
            ("HFREDUCE_PRIORITY", [&ALONE[..], &[("HFREDUCE_PRIORITY", "1")]].concat()),
            ("HFREDUCE_DETERMINISM", [&ALONE[..], &[("HFREDUCE_DETERMINISM", "yes")]].concat()),
            (
                "HFREDUCE_CONNECT_SECONDS",
                [&ALONE[..], &[("HFREDUCE_CONNECT_SECONDS", "0")]].concat(),
            ),
        ] {
            assert_eq!(read(&pairs).unwrap_err().name, name);
        }
    }
}

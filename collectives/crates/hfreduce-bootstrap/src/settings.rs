//! Settings of a rank, from the environment: the address of the rendezvous and engine options.

use std::path::PathBuf;
use std::time::Duration;

use fabric::interfaces::AddressSelector;
use hfreduce_engine::{Determinism, Priority};

use crate::variables::{self, Environment, Kind, SettingError};
use crate::wire::WORLD_MAX;

const KEY_BYTES_MIN: usize = 16;
const KEY_BYTES_MAX: usize = 4096;
/// Key of a group of one rank, which has no peer.
const KEY_OF_ONE: [u8; 32] = [0; 32];

/// Settings of one rank.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The job, for messages and authentication.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// HOST:PORT at which rank 0 listens.
    pub rendezvous: String,
    /// Key that authenticates the ranks of the job.
    pub key: Vec<u8>,
    /// File with the key.
    pub key_file: Option<String>,
    /// Name of this node; ranks with equal names share memory.
    pub node: String,
    /// Its network zone.
    pub zone: String,
    /// Addresses at which other nodes reach this node; by default all, best first.
    pub address: AddressSelector,
    /// Topology file; if set, node and zone are taken from it.
    pub topology: Option<PathBuf>,
    /// Size of a reduce chunk in bytes; otherwise the engine's default.
    pub chunk_bytes: Option<usize>,
    /// Time for which ranks wait for each other.
    pub connect: Duration,
    /// Silence after which a peer counts as stalled.
    pub liveness: Duration,
    /// Nodes on one machine share memory instead of using TCP.
    pub peer_memory: bool,
    /// TCP streams between two neighboring nodes; otherwise the engine's default.
    pub streams: Option<usize>,
    /// Guarantees about result bits beyond the default.
    pub determinism: Determinism,
    /// Priority among the groups of a process.
    pub priority: Priority,
    /// Socket of the `hfreduced` that runs the engine; none: the engine runs in this process.
    pub daemon: Option<PathBuf>,
    /// The CUDA driver library.
    pub cuda_library: Option<String>,
    /// The GDRCopy library, or `off`.
    pub gdrcopy: Option<String>,
    /// Maximum pinned memory of one GPU in bytes.
    pub pinned_bytes: Option<usize>,
    /// Maximum registered memory of this rank in bytes; the engine reads it by itself.
    pub registered_bytes: Option<usize>,
}

impl Settings {
    /// Default settings of a rank.
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
            priority: Priority::NORMAL,
            daemon: None,
            key_file: None,
            cuda_library: None,
            gdrcopy: None,
            pinned_bytes: None,
            registered_bytes: None,
        }
    }

    /// Reads rank, world size, rendezvous and all variables; empty values count as unset.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let mut settings = Self::read_variables(&get)?;
        let environment = Environment(get);
        let integer = |name: &'static str, min: u32, max: u32| {
            let value = environment.text(name).unwrap_or_default();
            let number = value.parse().ok().filter(|number| (min..=max).contains(number));
            let expected = Kind::Integer(min.into(), max.into());
            number.ok_or_else(|| SettingError::new(name, &value, expected))
        };
        settings.world_size = integer("WORLD_SIZE", 1, WORLD_MAX)?;
        settings.rank = integer("RANK", 0, settings.world_size - 1)?;
        settings.rendezvous = match environment.text(variables::RENDEZVOUS.name) {
            Some(address) => address,
            None => {
                let host = environment.text("MASTER_ADDR").ok_or_else(|| {
                    SettingError::new("MASTER_ADDR", "", "the host of rank 0, as launchers set it")
                })?;
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                format!("{host}:{}", integer("MASTER_PORT", 1, 65535)?)
            }
        };
        settings.rendezvous_address()?;
        settings.key = match &settings.key_file {
            Some(path) => Self::key_in(path)?,
            None if settings.world_size == 1 => KEY_OF_ONE.to_vec(),
            None => {
                let expected = "a file that only the ranks of the job can read, with at least 16 bytes: \
                            `head -c 32 /dev/urandom | base64 > key` creates one";
                return Err(SettingError::new(variables::KEY_FILE.name, "", expected));
            }
        };
        Ok(settings)
    }

    /// Reads the variables that do not depend on the rank; it is 0 of 1.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn read_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let environment = Environment(get);
        environment.check()?;
        let text = |name| environment.text(name);
        let mut settings = Self::new(0, 1, "", &[]);
        settings.key_file = text(variables::KEY_FILE.name);
        settings.job = text("FLYER_JOB").unwrap_or_default();
        settings.zone = text("FLYER_ZONE").unwrap_or(settings.zone);
        settings.topology = text("FLYER_TOPOLOGY").map(PathBuf::from);
        settings.daemon = text(variables::DAEMON.name).map(PathBuf::from);
        settings.cuda_library = text(variables::CUDA_LIBRARY.name);
        settings.gdrcopy = text(variables::GDRCOPY.name);
        settings.pinned_bytes = environment.parsed(&variables::PINNED_BYTES);
        settings.registered_bytes = environment.parsed(&variables::REGISTERED_BYTES);
        settings.address = environment.parsed(&variables::ADDRESS).unwrap_or_default();
        settings.chunk_bytes = environment.parsed(&variables::CHUNK_BYTES);
        settings.streams = environment.parsed(&variables::STREAMS);
        settings.peer_memory = text(variables::TRANSPORT.name).as_deref() != Some("tcp");
        settings.determinism = environment.parsed(&variables::DETERMINISM).unwrap_or_default();
        settings.priority = environment.parsed(&variables::PRIORITY).unwrap_or_default();
        let (connect, liveness) = (&variables::CONNECT_SECONDS, &variables::LIVENESS_SECONDS);
        settings.connect = environment.seconds(connect).unwrap_or(settings.connect);
        settings.liveness = environment.seconds(liveness).unwrap_or(settings.liveness);
        Ok(settings)
    }

    /// Parses addresses; `name` is the setting in errors.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn addresses(name: &'static str, value: &str) -> Result<AddressSelector, SettingError> {
        value.parse().map_err(|_| SettingError::new(name, value, Kind::Addresses))
    }

    /// Parses determinism modes; `name` is the setting in errors.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn modes(name: &'static str, value: &str) -> Result<Determinism, SettingError> {
        let expected = variables::DETERMINISM.kind;
        value.parse().map_err(|_| SettingError::new(name, value, expected))
    }

    /// Reads a key file; white space around the key is ignored.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn key_in(path: &str) -> Result<Vec<u8>, SettingError> {
        use std::io::Read;
        let mut key = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(KEY_BYTES_MAX as u64 + 1).read_to_end(&mut key));
        if let Err(error) = read {
            let expected = format!("a readable file ({error})");
            return Err(SettingError::new(variables::KEY_FILE.name, path, expected));
        }
        let key = key.trim_ascii();
        if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len()) {
            let bytes = key.len();
            let expected =
                format!("a file of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes, not {bytes}");
            return Err(SettingError::new(variables::KEY_FILE.name, path, expected));
        }
        Ok(key.to_vec())
    }

    /// Host and port of the rendezvous.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn rendezvous_address(&self) -> Result<(String, u16), SettingError> {
        let parts = self.rendezvous.rsplit_once(':');
        let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        match parts {
            Some((host, port)) if !host.is_empty() => {
                Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
            }
            _ => Err(SettingError::new(
                variables::RENDEZVOUS.name,
                &self.rendezvous,
                variables::RENDEZVOUS.kind,
            )),
        }
    }
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
        assert_eq!(settings.rendezvous_address().unwrap(), ("::1".to_owned(), 7));
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
    fn an_invalid_setting_is_named() {
        let two = [("RANK", "0"), ("WORLD_SIZE", "2"), ("HFREDUCE_RENDEZVOUS", "a:1")];
        for (name, pairs) in [
            ("WORLD_SIZE", vec![]),
            ("RANK", vec![("RANK", "2"), ("WORLD_SIZE", "2")]),
            ("MASTER_ADDR", vec![("RANK", "0"), ("WORLD_SIZE", "2")]),
            ("HFREDUCE_KEY_FILE", two.to_vec()),
            ("HFREDUCE_CHUNK_BYTES", [&ALONE[..], &[("HFREDUCE_CHUNK_BYTES", "1")]].concat()),
            ("HFREDUCE_ADDRESS", [&ALONE[..], &[("HFREDUCE_ADDRESS", "10.0.0/8")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "0")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "17")]].concat()),
            ("HFREDUCE_STREAMS", [&ALONE[..], &[("HFREDUCE_STREAMS", "auto")]].concat()),
            ("HFREDUCE_TRANSPORT", [&ALONE[..], &[("HFREDUCE_TRANSPORT", "rdma")]].concat()),
            ("HFREDUCE_RENDEZVOUS", [&ALONE[..2], &[("HFREDUCE_RENDEZVOUS", "a:x")]].concat()),
            ("HFREDUCE_PRIORITY", [&ALONE[..], &[("HFREDUCE_PRIORITY", "16")]].concat()),
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

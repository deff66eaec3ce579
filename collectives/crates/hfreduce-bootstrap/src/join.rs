//! Joining a group: the ranks exchange their placement, then their endpoints, then connect.
//!
//! A rank that was started with another topology, world size or job is reported before any
//! connection of the group is opened.

use std::net::IpAddr;
use std::time::Duration;

use fabric::deadline::Deadline;
use hfreduce_daemon::{AnyEndpoint, AnyNewcomer};
use hfreduce_engine::{CollectiveError, Communicator, Options};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::meeting::{Meeting, MeetingError, Who};
use crate::settings::Settings;
use crate::topology::{Place, Topology, TopologyError};
use crate::variables::SettingError;

/// Why a rank did not join its group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// A setting cannot be used.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The topology file cannot be used.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Meeting(#[from] MeetingError),
    /// A rank was started for something else.
    #[error("rank {rank} {problem}")]
    Disagreement {
        /// The rank that disagrees.
        rank: u32,
        /// Its value and the value of this rank.
        problem: String,
    },
    /// The engine did not connect.
    #[error(transparent)]
    Engine(#[from] CollectiveError),
}

/// What a rank publishes about itself, in the format of the Python package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Said {
    place: Place,
    job: String,
    /// A digest of the list of its ranks: the list itself would make the exchange quadratic in bytes.
    ranks: String,
    size: u32,
    bridges: Vec<[String; 2]>,
}

impl Settings {
    /// Meets the other ranks and connects.
    ///
    /// # Errors
    /// [`JoinError`] names the ranks that are absent or disagree.
    pub fn join(&self) -> Result<Communicator, JoinError> {
        let deadline = Deadline::after(self.connect);
        let left = || deadline.remaining().unwrap_or_default();
        let expected = self.expected_places()?;
        let own = match &expected {
            Some((_, places)) => {
                places.get(self.rank as usize).cloned().ok_or_else(|| SettingError {
                    name: "RANK",
                    value: self.rank.to_string(),
                    expected: format!("a number below the {} ranks that there are", places.len()),
                })?
            }
            None => Place { node: self.node.clone(), zone: self.zone.clone(), address: None },
        };
        let (host, port) = self.rendezvous_address()?;
        let who = Who { job: self.job.clone(), rank: self.rank, world_size: self.world_size };
        let meeting = Meeting::new(who, &host, port, &self.key)?;
        let said = Said {
            place: own.clone(),
            job: self.job.clone(),
            ranks: digest(self.world_size),
            size: self.world_size,
            bridges: expected.as_ref().map(|(file, _)| file.bridges.clone()).unwrap_or_default(),
        };
        let words = serde_json::to_vec(&said).unwrap_or_default();
        let told = meeting.exchange("place", &words, left())?;
        let places = agree(&said, &told, expected.as_ref().map(|(_, places)| places.as_slice()))?;
        let endpoint = self.endpoint(&own, &said, &places)?;
        let infos = meeting.exchange("endpoint", &endpoint.info(), left())?;
        Ok(endpoint.connect(&infos, left().max(Duration::from_millis(100)))?)
    }

    fn expected_places(&self) -> Result<Option<(Topology, Vec<Place>)>, JoinError> {
        let Some(path) = &self.topology else { return Ok(None) };
        let topology = Topology::load(path)?;
        let places = topology.places(0..self.world_size, self.world_size as usize)?;
        Ok(Some((topology, places)))
    }

    /// Opens a newcomer: a process that waits for admission to an existing group. It has a place
    /// and a key; the members assign its rank, so it does not take part in a meeting.
    ///
    /// # Errors
    /// A setting cannot be used, or the engine fails.
    pub fn newcomer(&self) -> Result<AnyNewcomer, JoinError> {
        let options = self.options(0, vec![(self.node.clone(), self.zone.clone())], None)?;
        Ok(AnyNewcomer::open(options, &self.key, self.daemon.as_deref())?)
    }

    fn endpoint(
        &self,
        own: &Place,
        said: &Said,
        places: &[Place],
    ) -> Result<AnyEndpoint, JoinError> {
        let placement =
            places.iter().map(|place| (place.node.clone(), place.zone.clone())).collect();
        let mut options = self.options(self.rank, placement, own.address.as_deref())?;
        let mut zones: Vec<&str> = places.iter().map(|place| place.zone.as_str()).collect();
        zones.sort_unstable();
        zones.dedup();
        if let ([[a, b]], 2) = (said.bridges.as_slice(), zones.len()) {
            options.bridge = Some((a.clone(), b.clone()));
        }
        Ok(AnyEndpoint::open(options, &self.key, self.daemon.as_deref())?)
    }

    /// The options of the engine; `address`: the address of this rank in the topology file.
    fn options(
        &self,
        rank: u32,
        placement: Vec<(String, String)>,
        address: Option<&str>,
    ) -> Result<Options, SettingError> {
        let mut options = Options::new(rank, placement);
        options.job.clone_from(&self.job);
        options.slot_bytes = self.chunk_bytes.unwrap_or(options.slot_bytes);
        options.peer_memory = self.peer_memory;
        options.streams = self.streams;
        options.determinism = self.determinism;
        options.priority = self.priority;
        options.liveness = self.liveness.min(Duration::from_secs(86_400));
        let given = address.map(|text| {
            text.parse::<IpAddr>().map_err(|_| SettingError {
                name: "address",
                value: text.to_owned(),
                expected: "an IP address in the topology file".to_owned(),
            })
        });
        options.address = match given.transpose()? {
            Some(given) if self.address.is_default() => given.into(),
            _ => self.address.clone(),
        };
        options.towards = self.rendezvous_address().ok().map(|(host, _)| host);
        Ok(options)
    }
}

/// The places that the ranks report, checked against the topology file of this rank.
fn agree(
    own: &Said,
    told: &[Vec<u8>],
    expected: Option<&[Place]>,
) -> Result<Vec<Place>, JoinError> {
    let mut places = Vec::with_capacity(told.len());
    for (rank, words) in told.iter().enumerate() {
        let problem = |problem: String| JoinError::Disagreement { rank: rank as u32, problem };
        let said: Said = serde_json::from_slice(words)
            .map_err(|error| problem(format!("speaks other words ({error}): use one release")))?;
        if said.job != own.job {
            let (theirs, ours) = (&said.job, &own.job);
            return Err(problem(format!("belongs to job `{theirs}`, this rank to `{ours}`")));
        }
        if (&said.ranks, said.size) != (&own.ranks, own.size) {
            let (theirs, ours) = (said.size, own.size);
            return Err(problem(format!("is in a group of {theirs} ranks, this rank of {ours}")));
        }
        if said.bridges != own.bridges {
            let (theirs, ours) = (&said.bridges, &own.bridges);
            return Err(problem(format!("has bridges {theirs:?}, this rank {ours:?}")));
        }
        if let Some(expected) = expected.filter(|expected| expected[rank] != said.place) {
            let (is, file) = (&said.place, &expected[rank]);
            return Err(problem(format!("runs on {is:?}, but the topology file says {file:?}")));
        }
        places.push(said.place);
    }
    Ok(places)
}

/// Digest of the ranks `0..world_size`; the Python package computes the same one of any list.
fn digest(world_size: u32) -> String {
    let mut sha = Sha256::new();
    for rank in 0..world_size {
        sha.update(if rank == 0 { rank.to_string() } else { format!(",{rank}") });
    }
    sha.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::{pack, unpack};
    use crate::wire::Answer;
    use hfreduce_testing::{cases, changed, changes, edited, edits};
    use proptest::prelude::*;

    fn said() -> Said {
        let place = Place { node: "a0".into(), zone: "A".into(), address: None };
        let bridges = vec![["a0".into(), "b0".into()]];
        Said { place, job: "default/gpt".into(), ranks: digest(2), size: 2, bridges }
    }

    proptest! {
        #![proptest_config(cases(2000))]

        #[test]
        fn a_rank_that_disagrees_is_named(edits in edits(), changes in changes()) {
            let (own, document) = (said(), serde_json::to_value(said()).unwrap());
            let words = edited(&document, &edits).into_bytes();
            for words in [changed(&words, &changes), words] {
                let told = [serde_json::to_vec(&own).unwrap(), words];
                match agree(&own, &told, None) {
                    Ok(places) => prop_assert_eq!(places.len(), 2),
                    Err(JoinError::Disagreement { rank, .. }) => prop_assert_eq!(rank, 1),
                    Err(other) => return Err(TestCaseError::fail(other.to_string())),
                }
            }
        }
    }

    /// What ranks of a cluster with 8 ranks a node bring to the two phases: endpoints as the engine
    /// makes them, with what is random or counted on real machines.
    fn brought(ranks: u32) -> [Vec<Vec<u8>>; 2] {
        let place = |rank: u32| Place {
            node: format!("node-{:05}", rank / 8),
            zone: if rank < ranks / 2 { "A" } else { "B" }.into(),
            address: None,
        };
        let placement: Vec<_> =
            (0..ranks).map(place).map(|place| (place.node, place.zone)).collect();
        let endpoint = |rank: u32| {
            let mut options = Options::new(rank, placement.clone());
            options.job = "default/gpt".into();
            let info = AnyEndpoint::open(options, &[7; 32], None).unwrap().info();
            let mut info: serde_json::Value = serde_json::from_slice(&info).unwrap();
            let node = rank / 8;
            let chance = digest(node);
            let boot = format!("{chance}-{chance}");
            info["host"] = format!("{boot} net:[{}]", 4_026_531_840_u32 + node * 77).into();
            let address = format!("10.3.{}.{}", node / 256, node % 256);
            info["addresses"] = vec![address, format!("fd00::{node:x}")].into();
            info["local_socket"] =
                if rank.is_multiple_of(8) { format!("hfreduce-{chance}") } else { String::new() }
                    .into();
            serde_json::to_vec(&info).unwrap()
        };
        let said = |rank| Said { place: place(rank), ranks: digest(ranks), size: ranks, ..said() };
        let said = |rank| serde_json::to_vec(&said(rank)).unwrap();
        [(0..ranks).map(said).collect(), (0..ranks).map(endpoint).collect()]
    }

    #[test]
    fn a_start_brings_at_most_64_bytes_of_a_rank_to_each() {
        let ranks = 1024;
        let mut bytes = 0;
        for values in brought(ranks) {
            let answer = Answer::Values(pack(&values).unwrap()).encode();
            let Ok(Answer::Values(blob)) = Answer::read(&mut answer.as_slice(), ranks) else {
                panic!("values became a failure");
            };
            assert_eq!(unpack(&blob, values.len()).unwrap(), values);
            bytes += answer.len();
        }
        assert!(bytes <= 64 * ranks as usize, "{} bytes for each rank", bytes / ranks as usize);
    }

    #[test]
    fn the_digest_is_the_python_packages() {
        // hashlib.sha256(b"0,1,2").hexdigest()[:16]
        assert_eq!(digest(3), "c0be322c1ad6af50");
    }
}

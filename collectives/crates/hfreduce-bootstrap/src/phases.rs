//! Phases of a join: the values that the ranks exchange, and their checks.

use fabric::deadline::Deadline;
use serde::{Deserialize, Serialize};

use crate::error::{Disagreement, JoinError};
use crate::membership::Membership;
use crate::rendezvous::Rendezvous;
use crate::topology::{Place, Topology};
use crate::world::World;

const PLACE: &str = "place";
const ENDPOINT: &str = "endpoint";

/// Value of the phase `place`: where a rank runs, and its view of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlaceValue {
    place: Place,
    job: String,
    /// Digest of the group's list of ranks: the list itself would make the exchange quadratic in bytes.
    ranks: String,
    size: usize,
    bridges: Vec<[String; 2]>,
}

/// Value of the phase `endpoint` in a group whose places are known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EndpointValue {
    world: String,
    ranks: String,
    info: String,
}

impl PlaceValue {
    pub(crate) fn new(
        place: Place,
        job: &str,
        membership: &Membership,
        topology: Option<&Topology>,
    ) -> Self {
        Self {
            place,
            job: job.to_owned(),
            ranks: membership.digest(),
            size: membership.size(),
            bridges: topology.map(|topology| topology.bridges.clone()).unwrap_or_default(),
        }
    }
}

/// Exchanges the places of all ranks and checks them against the topology file of this rank.
///
/// Groups of a subset of the ranks use the places that the world has exchanged.
pub(crate) fn exchange_places<R: Rendezvous>(
    rendezvous: &R,
    membership: &Membership,
    own: &PlaceValue,
    topology: Option<&Topology>,
    deadline: Deadline,
) -> Result<Vec<Place>, JoinError<R::Error>> {
    let value = serde_json::to_vec(own).unwrap_or_default();
    let exchanged = rendezvous.exchange(PLACE, &value, deadline).map_err(JoinError::Rendezvous)?;
    let places = agree(membership, own, topology, &exchanged.values)?;
    if membership.is_world() && !exchanged.name.is_empty() {
        World::store(&own.job, membership, exchanged.name, &places);
    }
    Ok(places)
}

/// Exchanges the endpoint infos of all ranks.
///
/// In a group whose places were not exchanged (`world` is set), ranks also check that they took them
/// from the same exchange.
pub(crate) fn exchange_infos<R: Rendezvous>(
    rendezvous: &R,
    membership: &Membership,
    world: Option<&World>,
    info: Vec<u8>,
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>, JoinError<R::Error>> {
    let exchange = |value: &[u8]| {
        let exchanged = rendezvous.exchange(ENDPOINT, value, deadline);
        Ok(exchanged.map_err(JoinError::Rendezvous)?.values)
    };
    let Some(world) = world else { return exchange(&info) };
    let own = EndpointValue {
        world: world.exchange.clone(),
        ranks: membership.digest(),
        info: String::from_utf8_lossy(&info).into_owned(),
    };
    let values = exchange(&serde_json::to_vec(&own).unwrap_or_default())?;
    Ok(infos(membership, &own, &values)?)
}

fn agree(
    membership: &Membership,
    own: &PlaceValue,
    topology: Option<&Topology>,
    values: &[Vec<u8>],
) -> Result<Vec<Place>, Disagreement> {
    let check = |rank: u32, value: &[u8]| {
        let other: PlaceValue = read(value)?;
        if other.job != own.job {
            return Err(format!("belongs to job '{}', this rank to '{}'", other.job, own.job));
        }
        if (&other.ranks, other.size) != (&own.ranks, own.size) {
            return Err(format!(
                "is in a group of {} ranks, this rank in one of {}, or their lists of ranks differ",
                other.size, own.size
            ));
        }
        if other.bridges != own.bridges {
            return Err(format!("has bridges {:?}, this rank {:?}", other.bridges, own.bridges));
        }
        let Some(topology) = topology else { return Ok(other.place) };
        match topology.place(rank) {
            Some(expected) if *expected == other.place => Ok(other.place),
            Some(expected) => {
                Err(format!("runs on {}, but {} has {expected}", other.place, topology.source))
            }
            None => Err(format!("is not in {}", topology.source)),
        }
    };
    checked(PLACE, membership, values, check)
}

fn infos(
    membership: &Membership,
    own: &EndpointValue,
    values: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, Disagreement> {
    checked(ENDPOINT, membership, values, |_, value| {
        let other: EndpointValue = read(value)?;
        if other.world != own.world {
            return Err("is from another start of the job: restart all ranks".to_owned());
        }
        if other.ranks != own.ranks {
            return Err("has a different list of ranks: pass the same list on all ranks".to_owned());
        }
        Ok(other.info.into_bytes())
    })
}

/// Results of `check`, called with the rank and the value of each member.
fn checked<T>(
    phase: &'static str,
    membership: &Membership,
    values: &[Vec<u8>],
    check: impl Fn(u32, &[u8]) -> Result<T, String>,
) -> Result<Vec<T>, Disagreement> {
    let ranks = membership.global_ranks();
    if values.len() != ranks.len() {
        let problem = format!("received {} values of {} ranks", values.len(), ranks.len());
        return Err(Disagreement { rank: membership.global_rank(), phase, problem });
    }
    let members = ranks.iter().zip(values);
    let results = members.map(|(rank, value)| {
        check(*rank, value).map_err(|problem| Disagreement { rank: *rank, phase, problem })
    });
    results.collect()
}

fn read<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(value).map_err(|error| {
        format!("published a value that cannot be read ({error}): install the same release")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::bundle::{pack, unpack};
    use crate::wire::Answer;
    use hfreduce_daemon::AnyEndpoint;
    use hfreduce_engine::Options;
    use hfreduce_testing::{cases, changed, changes, edited, edits};
    use proptest::prelude::*;

    const JOB: &str = "default/gpt";

    fn world(rank: u32, ranks: u32) -> Membership {
        Membership::world(rank, ranks).unwrap()
    }

    fn place(rank: u32, ranks: u32) -> Place {
        Place {
            node: format!("node-{:05}", rank / 8),
            zone: if rank < ranks / 2 { "A" } else { "B" }.into(),
            address: None,
        }
    }

    fn own() -> PlaceValue {
        let mut value = PlaceValue::new(place(0, 2), JOB, &world(0, 2), None);
        value.bridges = vec![["a0".into(), "b0".into()]];
        value
    }

    #[test]
    fn a_wrong_number_of_values_is_refused() {
        let own = own();
        let value = serde_json::to_vec(&own).unwrap();
        for count in [0, 1, 3] {
            let error = agree(&world(0, 2), &own, None, &vec![value.clone(); count]).unwrap_err();
            assert_eq!(error.problem, format!("received {count} values of 2 ranks"));
        }
    }

    proptest! {
        #![proptest_config(cases(2000))]

        #[test]
        fn a_rank_that_disagrees_is_named(edits in edits(), changes in changes()) {
            let own = own();
            let value = edited(&serde_json::to_value(&own).unwrap(), &edits).into_bytes();
            for value in [changed(&value, &changes), value] {
                let values = [serde_json::to_vec(&own).unwrap(), value];
                match agree(&world(0, 2), &own, None, &values) {
                    Ok(places) => prop_assert_eq!(places.len(), 2),
                    Err(error) => prop_assert_eq!((error.rank, error.phase), (1, PLACE)),
                }
            }
        }

        #[test]
        fn a_rank_of_another_world_is_named(edits in edits(), changes in changes()) {
            let own = EndpointValue { world: "1".into(), ranks: "2".into(), info: "{}".into() };
            let value = edited(&serde_json::to_value(&own).unwrap(), &edits).into_bytes();
            let members = Membership::new(0, vec![4, 7], 8).unwrap();
            for value in [changed(&value, &changes), value] {
                let values = [serde_json::to_vec(&own).unwrap(), value];
                match infos(&members, &own, &values) {
                    Ok(infos) => prop_assert_eq!(infos.len(), 2),
                    Err(error) => prop_assert_eq!((error.rank, error.phase), (7, ENDPOINT)),
                }
            }
        }
    }

    #[test]
    fn each_disagreement_has_its_text() {
        let members = Membership::new(0, vec![3, 5], 8).unwrap();
        let own = PlaceValue::new(place(3, 8), JOB, &members, None);
        let text = |change: fn(&mut PlaceValue)| {
            let mut other = own.clone();
            change(&mut other);
            let values = [&own, &other].map(|value| serde_json::to_vec(value).unwrap());
            agree(&members, &own, None, &values).unwrap_err().to_string()
        };
        for (text, expected) in [
            (text(|other| other.job = "b".into()), "rank 5 belongs to job 'b', this rank to"),
            (
                text(|other| other.size = 3),
                "rank 5 is in a group of 3 ranks, this rank in one of 2",
            ),
            (text(|other| other.ranks = "0".into()), "rank 5 is in a group of 2 ranks"),
            (text(|other| other.bridges = vec![[String::new(), String::new()]]), "has bridges"),
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn a_place_other_than_that_of_the_file_is_named() {
        let file = r#"{"version": 1, "ranks_per_node": 1,
            "nodes": [{"name": "a0", "zone": "A"}, {"name": "a1", "zone": "A"}]}"#;
        let file = Topology::parse(file, "t.json").unwrap();
        let members = world(0, 2);
        let value = |node: usize| {
            let value = PlaceValue::new(file.nodes[node].clone(), JOB, &members, Some(&file));
            serde_json::to_vec(&value).unwrap()
        };
        let own: PlaceValue = read(&value(0)).unwrap();
        assert!(agree(&members, &own, Some(&file), &[value(0), value(1)]).is_ok());
        let error = agree(&members, &own, Some(&file), &[value(0), value(0)]).unwrap_err();
        let expected = "rank 1 runs on node a0 in zone A, but t.json has node a1 in zone A";
        assert_eq!(error.to_string(), expected);
    }

    /// A rendezvous at which all other ranks have published already.
    struct Published {
        name: &'static str,
        others: HashMap<&'static str, Vec<Vec<u8>>>,
    }

    impl Rendezvous for Published {
        type Error = String;

        fn host(&self) -> Option<String> {
            None
        }

        fn exchange(
            &self,
            phase: &str,
            value: &[u8],
            _: Deadline,
        ) -> Result<crate::Exchanged, String> {
            let others = self.others.get(phase).ok_or_else(|| format!("phase {phase}"))?;
            let values = std::iter::once(value.to_vec()).chain(others.iter().cloned()).collect();
            Ok(crate::Exchanged { name: self.name.to_owned(), values })
        }

        fn key(&self, _: Deadline) -> Result<Vec<u8>, String> {
            Err("key".into())
        }
    }

    #[test]
    fn a_group_of_a_known_world_compares_the_world_instead_of_the_places() {
        let deadline = Deadline::after(std::time::Duration::from_secs(1));
        let job = "test/known-world";
        let value = |rank| PlaceValue::new(place(rank, 3), job, &world(rank, 3), None);
        let others: Vec<_> = (1..3).map(|rank| serde_json::to_vec(&value(rank)).unwrap()).collect();
        let start = |name| {
            let others = HashMap::from([(PLACE, others.clone())]);
            let rendezvous = Published { name, others };
            exchange_places(&rendezvous, &world(0, 3), &value(0), None, deadline).unwrap()
        };
        let part = Membership::new(0, vec![0, 2], 3).unwrap();
        assert_eq!(start("").len(), 3);
        assert!(World::of(job, &part).is_none());
        start("earlier");
        let earlier = World::of(job, &part).unwrap();
        start("later");
        let later = World::of(job, &part).unwrap();
        assert_eq!(later.places(part.global_ranks()).unwrap(), [place(0, 3), place(2, 3)]);
        assert!(World::of("test/another", &part).is_none());

        let exchange = |world: &World, other: EndpointValue| {
            let others = HashMap::from([(ENDPOINT, vec![serde_json::to_vec(&other).unwrap()])]);
            let rendezvous = Published { name: "", others };
            exchange_infos(&rendezvous, &part, Some(world), b"own".to_vec(), deadline)
                .map_err(|error| error.to_string())
        };
        let other =
            || EndpointValue { world: "later".into(), ranks: part.digest(), info: "other".into() };
        assert_eq!(exchange(&later, other()).unwrap(), [b"own".to_vec(), b"other".to_vec()]);
        let error = exchange(&earlier, other()).unwrap_err();
        assert_eq!(error, "rank 2 is from another start of the job: restart all ranks");
        let error = exchange(&later, EndpointValue { ranks: "x".into(), ..other() }).unwrap_err();
        assert!(error.starts_with("rank 2 has a different list of ranks"), "{error}");
    }

    /// Values of the two phases in a cluster with 8 ranks a node: endpoints as the engine makes
    /// them, with the random and counted parts of real machines.
    fn values(ranks: u32) -> [Vec<Vec<u8>>; 2] {
        let places: Vec<_> = (0..ranks).map(|rank| place(rank, ranks)).collect();
        let placement: Vec<_> =
            places.iter().map(|place| (place.node.clone(), place.zone.clone())).collect();
        let endpoint = |rank: u32| {
            let mut options = Options::new(rank, placement.clone());
            options.job = JOB.into();
            let info = AnyEndpoint::open(options, &[7; 32], None).unwrap().info();
            let mut info: serde_json::Value = serde_json::from_slice(&info).unwrap();
            let node = rank / 8;
            let random = world(0, node + 1).digest();
            info["host"] =
                format!("{random}-{random} net:[{}]", 4_026_531_840_u32 + node * 77).into();
            let address = format!("10.3.{}.{}", node / 256, node % 256);
            info["addresses"] = vec![address, format!("fd00::{node:x}")].into();
            info["local_socket"] =
                if rank.is_multiple_of(8) { format!("hfreduce-{random}") } else { String::new() }
                    .into();
            serde_json::to_vec(&info).unwrap()
        };
        let members = world(0, ranks);
        let place = |place: Place| {
            let (ranks, size) = (members.digest(), members.size());
            let value = PlaceValue { place, ranks, size, ..own() };
            serde_json::to_vec(&value).unwrap()
        };
        [places.into_iter().map(place).collect(), (0..ranks).map(endpoint).collect()]
    }

    #[test]
    fn a_join_sends_at_most_64_bytes_per_rank_to_each_rank() {
        let ranks = 1024;
        let mut bytes = 0;
        for values in values(ranks) {
            let answer = Answer::Values(pack(&values).unwrap()).encode();
            let Ok(Answer::Values(blob)) = Answer::read(&mut answer.as_slice(), ranks) else {
                panic!("values became a failure");
            };
            assert_eq!(unpack(&blob, values.len()).unwrap(), values);
            bytes += answer.len();
        }
        assert!(bytes <= 64 * ranks as usize, "{} bytes for each rank", bytes / ranks as usize);
    }
}

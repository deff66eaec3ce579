//! Concurrent random transactions on few keys. Afterwards all committed ones are repeated in the
//! order of their stamps on a plain map, and every read must match.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use threefs_kv::{KeyRange, KvError, Row, Store, Versionstamp};

use crate::backends::stores;

const TASKS: u64 = 8;
const TRANSACTIONS_PER_TASK: usize = 150;
const KEYS: u8 = 6;

#[derive(Debug)]
enum Step {
    Get(Vec<u8>, Option<Vec<u8>>),
    Range(KeyRange, usize, Vec<Row>),
    Set(Vec<u8>, Vec<u8>),
    Clear(Vec<u8>),
    ClearRange(KeyRange),
    Add(Vec<u8>, i64),
}

/// Sorted by stamp; a read-only one comes after everything that its snapshot saw.
#[derive(Debug)]
struct Committed {
    place: (u64, u16, bool),
    steps: Vec<Step>,
}

fn key(number: u8) -> Vec<u8> {
    vec![b'k', number]
}

fn random_range(random: &mut StdRng) -> KeyRange {
    let (start, end) = (random.random_range(0..KEYS), random.random_range(0..=KEYS));
    KeyRange::new(key(start), key(end))
}

async fn random_transaction(
    store: &Store,
    random: &mut StdRng,
) -> Result<Option<Committed>, KvError> {
    let mut txn = store.begin().await?;
    let mut steps = Vec::new();
    for _ in 0..random.random_range(1..7) {
        let at = key(random.random_range(0..KEYS));
        match random.random_range(0..10) {
            0..3 => steps.push(Step::Get(at.clone(), txn.get(&at).await?)),
            3..5 => {
                let (range, limit) = (random_range(random), random.random_range(1..4));
                let rows = txn.range(&range, limit).await?;
                steps.push(Step::Range(range, limit, rows));
            }
            5..7 => {
                let value = random.random::<i64>().to_le_bytes().to_vec();
                txn.set(&at, value.clone());
                steps.push(Step::Set(at, value));
            }
            7 => {
                txn.clear(&at);
                steps.push(Step::Clear(at));
            }
            8 => {
                let range = random_range(random);
                txn.clear_range(range.clone());
                steps.push(Step::ClearRange(range));
            }
            _ => {
                let delta = random.random_range(-5..5);
                txn.atomic_add(&at, delta);
                steps.push(Step::Add(at, delta));
            }
        }
        tokio::task::yield_now().await;
    }
    let wrote = !txn.is_read_only();
    match txn.commit().await {
        Ok(stamp) => Ok(Some(Committed { place: place(stamp, wrote), steps })),
        Err(error) if error.retryable() => Ok(None),
        Err(error) => Err(error),
    }
}

fn place(stamp: Versionstamp, wrote: bool) -> (u64, u16, bool) {
    let order = u16::from_be_bytes([stamp.0[8], stamp.0[9]]);
    (stamp.version(), if wrote { order } else { u16::MAX }, !wrote)
}

fn replay(history: &[Committed]) {
    let mut rows: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    let inside = |range: &KeyRange| range.start.clone()..range.end.clone().max(range.start.clone());
    for committed in history {
        for step in &committed.steps {
            match step {
                Step::Get(key, value) => assert_eq!(rows.get(key), value.as_ref(), "{committed:?}"),
                Step::Range(range, limit, read) => {
                    let expected: Vec<Row> = rows
                        .range(inside(range))
                        .take(*limit)
                        .map(|(key, value)| (key.clone(), value.clone()))
                        .collect();
                    assert_eq!(&expected, read, "{committed:?}");
                }
                Step::Set(key, value) => drop(rows.insert(key.clone(), value.clone())),
                Step::Clear(key) => drop(rows.remove(key)),
                Step::ClearRange(range) => rows.retain(|key, _| !range.contains(key)),
                Step::Add(key, delta) => {
                    let value = rows.entry(key.clone()).or_insert_with(|| vec![0; 8]);
                    let sum = i64::from_le_bytes(value.as_slice().try_into().unwrap());
                    *value = sum.wrapping_add(*delta).to_le_bytes().to_vec();
                }
            }
        }
    }
}

async fn check(store: Store, seed: u64) {
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(seed * 1000 + task);
                let mut committed = Vec::new();
                let mut conflicts = 0;
                for _ in 0..TRANSACTIONS_PER_TASK {
                    match random_transaction(&store, &mut random).await.unwrap() {
                        Some(transaction) => committed.push(transaction),
                        None => conflicts += 1,
                    }
                }
                (committed, conflicts)
            })
        })
        .collect();
    let (mut history, mut conflicts) = (Vec::new(), 0);
    for task in tasks {
        let (committed, conflicted) = task.await.unwrap();
        history.extend(committed);
        conflicts += conflicted;
    }
    history.sort_by_key(|committed| committed.place);
    replay(&history);
    assert!(conflicts > 20, "only {conflicts} conflicts: nothing was tested");
    assert!(history.len() > 100, "only {} commits", history.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committed_transactions_have_a_serial_order() {
    for seed in 0..3 {
        for (store, _resources) in stores().await {
            check(store, seed).await;
        }
    }
}

/// The same steps on all stores, one transaction after the other, give the same reads: this
/// detects errors of one store even without conflicts.
#[tokio::test]
async fn all_stores_read_the_same() {
    let mut reads: Vec<Vec<String>> = Vec::new();
    for (store, _resources) in stores().await {
        let mut random = StdRng::seed_from_u64(7);
        let mut versions = Vec::new();
        for _ in 0..200 {
            let committed = random_transaction(&store, &mut random).await.unwrap().unwrap();
            versions.push(format!("{:?}", committed.steps));
        }
        reads.push(versions);
    }
    assert!(reads.windows(2).all(|pair| pair[0] == pair[1]));
}

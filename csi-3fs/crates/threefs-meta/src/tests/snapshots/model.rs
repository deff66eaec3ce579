//! Random changes of a volume with snapshots, compared with copies of the whole tree.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use threefs_core::ids::InodeId;
use threefs_kv::Store;

use crate::Identity;
use crate::protocol::{At, MetaChange, MetaError, MetaRequest, SetMode, TrashChange};
use crate::tests::fixture::{Fixture, collect_with_all, config, count_inodes, soon};
use crate::tests::invariants::check_tree;
use crate::tests::model::{Action, Model, Path, action, change_of, path, refusal, text};
use crate::tests::snapshots::{Seen, TestFences, create_snapshot, history_rows, remove_snapshot};
use crate::tree::now;

const BASE: &str = "/volume";
/// Less than a page of the history.
const SNAPSHOTS_MAX: usize = 6;

#[derive(Clone, Debug)]
enum Step {
    Change(Action),
    Mode(Path, u32),
    Attribute(Path, u8, Option<u8>),
    Create,
    /// A snapshot, by its place among all.
    Remove(usize),
    /// A creation that is given up.
    Abort,
    DropHistory,
    Collect,
    /// The retention of the trash, in seconds.
    Keep(u64),
    /// A change of a snapshot, by its place.
    ChangeSnapshot(usize, Action),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        20 => action().prop_map(Step::Change),
        2 => (path(), 0u32..0o1000).prop_map(|(path, mode)| Step::Mode(path, mode)),
        3 => (path(), 0u8..3, prop::option::weighted(0.7, any::<u8>()))
            .prop_map(|(path, name, value)| Step::Attribute(path, name, value)),
        4 => Just(Step::Create),
        2 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Abort),
        1 => Just(Step::DropHistory),
        1 => Just(Step::Collect),
        1 => prop::sample::select(vec![0, 1000]).prop_map(Step::Keep),
        1 => (any::<usize>(), action()).prop_map(|(at, action)| Step::ChangeSnapshot(at, action)),
    ]
}

struct Run {
    fixtures: Vec<Fixture>,
    fences: Arc<TestFences>,
    model: Model,
    snapshots: BTreeMap<String, BTreeMap<String, Seen>>,
    created: usize,
}

impl Run {
    async fn new(store: &Store, services: usize) -> Self {
        let fences = Arc::new(TestFences::default());
        let mut fixtures = Vec::new();
        for _ in 0..services {
            let fixture = Fixture::open(store.clone(), config()).await;
            fixtures.push(fixture.with_fences(Arc::clone(&fences) as Arc<_>));
        }
        fixtures[0].volume(BASE).await;
        let (model, snapshots) = (Model::new(), BTreeMap::new());
        Self { fixtures, fences, model, snapshots, created: 0 }
    }

    /// Sends a change to a service, and again to the next one, as after a lost reply.
    async fn send(&self, number: usize, change: MetaChange) -> Result<(), MetaError> {
        let fixture = &self.fixtures[number % self.fixtures.len()];
        let other = &self.fixtures[(number + 1) % self.fixtures.len()];
        let (id, caller) = (fixture.next_id(), Identity::ROOT);
        let request = MetaRequest::Change { id, caller, change };
        let first = fixture.tree.answer(request.clone(), soon()).await;
        let again = other.tree.answer(request, soon()).await;
        if first.is_ok() {
            assert_eq!(first, again, "a retry was executed");
        }
        first.map(drop)
    }

    fn name_at(&self, at: usize) -> Option<String> {
        self.snapshots.keys().nth(at.checked_rem(self.snapshots.len())?).cloned()
    }

    async fn step(&mut self, number: usize, step: &Step) {
        let fixture = &self.fixtures[number % self.fixtures.len()];
        match step {
            Step::Change(action) => {
                let expected = self.model.apply(action);
                let outcome = match change_of(fixture, BASE, action).await {
                    Ok(change) => self.send(number, change).await,
                    Err(error) => Err(error),
                };
                let outcome = outcome.map_err(|error| refusal(&error));
                assert_eq!(outcome, expected.map_err(String::from), "{action:?}");
            }
            Step::Mode(path, mode) => {
                let change = MetaChange::SetAttributes {
                    at: At::path(text(BASE, path)),
                    follow: false,
                    mode: Some(*mode),
                    uid: None,
                    gid: None,
                    accessed: None,
                    modified: None,
                };
                let _ = self.send(number, change).await;
            }
            Step::Attribute(path, name, value) => {
                let change = MetaChange::SetAttribute {
                    at: At::path(text(BASE, path)),
                    name: format!("user.{name}"),
                    value: value.map(|value| vec![value; usize::from(value)]),
                    mode: SetMode::Any,
                };
                let _ = self.send(number, change).await;
            }
            Step::Create if self.snapshots.len() < SNAPSHOTS_MAX => {
                self.created += 1;
                let name = format!("s{}", self.created);
                let seen = fixture.everything(BASE).await;
                self.send(number, create_snapshot(BASE, &name)).await.unwrap();
                self.snapshots.insert(name, seen);
            }
            Step::Create => {}
            Step::Abort => {
                self.fences.fail.store(true, std::sync::atomic::Ordering::SeqCst);
                let refused = self.send(number, create_snapshot(BASE, "aborted")).await;
                assert!(matches!(refused, Err(MetaError::Unavailable { .. })), "{refused:?}");
                self.fences.fail.store(false, std::sync::atomic::Ordering::SeqCst);
            }
            Step::Remove(at) => {
                if let Some(name) = self.name_at(*at) {
                    self.send(number, remove_snapshot(BASE, &name)).await.unwrap();
                    self.snapshots.remove(&name);
                }
            }
            Step::DropHistory => self.drop_history().await,
            Step::Collect => collect_with_all(&self.fixtures).await,
            Step::Keep(seconds) => self.keep_removed(number, *seconds).await,
            Step::ChangeSnapshot(at, action) => {
                if let Some(name) = self.name_at(*at) {
                    let base = format!("{BASE}/.snapshots/{name}");
                    if let Ok(change) = change_of(fixture, &base, action).await {
                        self.refused(number, change).await;
                    }
                }
            }
        }
    }

    /// A change of a snapshot is refused, unless it changes nothing.
    async fn refused(&self, number: usize, change: MetaChange) {
        let changes_nothing = match &change {
            MetaChange::Create { exclusive, .. } => !exclusive,
            MetaChange::MakeDirectory { parents, .. } => *parents,
            MetaChange::Rename { .. } => true,
            MetaChange::ReportLengths { .. } => true,
            _ => false,
        };
        let outcome = self.send(number, change.clone()).await;
        assert!(outcome.is_err() || changes_nothing, "{change:?}");
    }

    async fn keep_removed(&self, number: usize, seconds: u64) {
        let keep = TrashChange::Keep { at: At::path(BASE), seconds };
        self.send(number, MetaChange::Trash(keep)).await.unwrap();
        for fixture in &self.fixtures {
            fixture.tree.expire_trash(now(), InodeId(0)).await.unwrap();
        }
    }

    async fn drop_history(&self) {
        for fixture in &self.fixtures {
            fixture.tree.drop_history().await.unwrap();
        }
    }

    async fn compare(&self) {
        for fixture in &self.fixtures {
            for (name, seen) in &self.snapshots {
                let now = fixture.everything(&format!("{BASE}/.snapshots/{name}")).await;
                assert_eq!(&now, seen, "snapshot {name}");
            }
            let paths = self.snapshots.iter().flat_map(|(name, seen)| {
                seen.keys().map(move |path| format!("{BASE}/.snapshots/{name}{path}"))
            });
            fixture.check_shown(paths).await;
        }
    }
}

async fn run(steps: Vec<Step>, services: usize) {
    let store = match services {
        1 => Store::memory(),
        _ => Store::shared_memory(),
    };
    let mut run = Run::new(&store, services).await;
    for (number, step) in steps.iter().enumerate() {
        run.step(number, step).await;
        check_tree(&store).await;
    }
    run.compare().await;
    run.keep_removed(0, 0).await;
    collect_with_all(&run.fixtures).await;
    run.drop_history().await;
    check_tree(&store).await;
    run.compare().await;
    while let Some(name) = run.name_at(0) {
        run.send(0, remove_snapshot(BASE, &name)).await.unwrap();
        run.snapshots.remove(&name);
        run.drop_history().await;
        check_tree(&store).await;
        run.compare().await;
    }
    collect_with_all(&run.fixtures).await;
    check_tree(&store).await;
    assert_eq!(history_rows(&store).await, Vec::<String>::new());
    // The root, and the volume in place of the root of the model.
    assert_eq!(count_inodes(&store).await, run.model.count() + 1, "after collecting");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn snapshots_show_the_tree_as_it_was(steps in prop::collection::vec(step(), 1..50)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps, 1));
    }

    #[test]
    fn snapshots_of_two_services_show_the_tree_as_it_was(
        steps in prop::collection::vec(step(), 1..50)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps, 2));
    }
}

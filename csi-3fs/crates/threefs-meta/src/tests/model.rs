//! Random changes, each sent twice, compared with a simple model: nested maps.

use std::collections::BTreeMap;

use proptest::prelude::*;
use threefs_kv::Store;

use crate::Identity;
use crate::RenameMode;
use crate::protocol::{
    At, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult,
};
use crate::tests::fixture::{
    Fixture, collect_with_all, config, count_inodes, make_directory, soon,
};
use crate::tests::invariants::check_tree;

/// Files by number, so that hard links share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    File(usize),
    Directory(BTreeMap<String, Node>),
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    root: Node,
    lengths: Vec<u64>,
}

pub(crate) type Refusal = &'static str;

impl Model {
    pub(crate) fn new() -> Self {
        Self { root: Node::Directory(BTreeMap::new()), lengths: Vec::new() }
    }

    /// The directory that holds the last name of a path.
    fn holder(&mut self, path: &[String]) -> Result<&mut BTreeMap<String, Node>, Refusal> {
        let mut at = &mut self.root;
        for name in &path[..path.len() - 1] {
            at = match at {
                Node::Directory(names) => names.get_mut(name).ok_or("NotFound")?,
                Node::File(_) => return Err("NotADirectory"),
            };
        }
        match at {
            Node::Directory(names) => Ok(names),
            Node::File(_) => Err("NotADirectory"),
        }
    }

    fn find(&mut self, path: &[String]) -> Result<Option<Node>, Refusal> {
        Ok(self.holder(path)?.get(&path[path.len() - 1]).cloned())
    }

    fn insert(&mut self, path: &[String], node: Node) -> Result<(), Refusal> {
        self.holder(path)?.insert(path[path.len() - 1].clone(), node);
        Ok(())
    }

    fn take(&mut self, path: &[String]) -> Result<(), Refusal> {
        self.holder(path)?.remove(&path[path.len() - 1]);
        Ok(())
    }

    fn file(&mut self, path: &[String]) -> Result<usize, Refusal> {
        match self.find(path)?.ok_or("NotFound")? {
            Node::File(number) => Ok(number),
            Node::Directory(_) => Err("IsADirectory"),
        }
    }

    pub(crate) fn apply(&mut self, action: &Action) -> Result<(), Refusal> {
        match action {
            Action::Create(path, exclusive) => match self.find(path)? {
                Some(_) if *exclusive => Err("Exists"),
                Some(_) => Ok(()),
                None => {
                    self.lengths.push(0);
                    let number = self.lengths.len() - 1;
                    self.insert(path, Node::File(number))
                }
            },
            Action::MakeDirectory(path) => match self.find(path)? {
                Some(_) => Err("Exists"),
                None => self.insert(path, Node::Directory(BTreeMap::new())),
            },
            Action::MakeDirectories(path) => {
                let mut attempt = self.clone();
                for end in 1..=path.len() {
                    match attempt.find(&path[..end])? {
                        None => attempt.insert(&path[..end], Node::Directory(BTreeMap::new()))?,
                        Some(Node::File(_)) if end == path.len() => return Err("Exists"),
                        Some(_) => {}
                    }
                }
                *self = attempt;
                Ok(())
            }
            Action::Link(from, to) => {
                let number = match self.find(from)?.ok_or("NotFound")? {
                    Node::File(number) => number,
                    Node::Directory(_) => return Err("NotPermitted"),
                };
                match self.find(to)? {
                    Some(_) => Err("Exists"),
                    None => self.insert(to, Node::File(number)),
                }
            }
            Action::Rename(from, to, no_replace) => self.rename(from, to, *no_replace),
            Action::Unlink(path) => {
                self.file(path)?;
                self.take(path)
            }
            Action::RemoveDirectory(path) => match self.find(path)?.ok_or("NotFound")? {
                Node::File(_) => Err("NotADirectory"),
                Node::Directory(names) if !names.is_empty() => Err("NotEmpty"),
                Node::Directory(_) => self.take(path),
            },
            Action::RemoveTree(path) => {
                self.find(path)?.ok_or("NotFound")?;
                self.take(path)
            }
            Action::Report(path, length) => {
                let number = self.file(path)?;
                self.lengths[number] = self.lengths[number].max(*length);
                Ok(())
            }
            Action::SetLength(path, length) => {
                let number = self.file(path)?;
                self.lengths[number] = *length;
                Ok(())
            }
        }
    }

    fn rename(&mut self, from: &[String], to: &[String], no_replace: bool) -> Result<(), Refusal> {
        let source = self.find(from)?;
        let target = self.find(to)?;
        let node = source.ok_or("NotFound")?;
        if target.is_some() && no_replace {
            return Err("Exists");
        }
        if from == to || matches!((&node, &target), (Node::File(a), Some(Node::File(b))) if a == b)
        {
            return Ok(());
        }
        let is_directory = matches!(node, Node::Directory(_));
        if is_directory && to.starts_with(from) {
            return Err("Invalid");
        }
        match target {
            Some(Node::Directory(_)) if !is_directory => return Err("IsADirectory"),
            Some(Node::File(_)) if is_directory => return Err("NotADirectory"),
            Some(Node::Directory(names)) if !names.is_empty() => return Err("NotEmpty"),
            _ => {}
        }
        self.take(from)?;
        self.insert(to, node)
    }

    /// Every path with its length, directories with `None`.
    pub(crate) fn dump(&self) -> BTreeMap<String, Option<u64>> {
        fn walk(model: &Model, node: &Node, path: &str, into: &mut BTreeMap<String, Option<u64>>) {
            match node {
                Node::File(number) => drop(into.insert(path.into(), Some(model.lengths[*number]))),
                Node::Directory(names) => {
                    into.insert(path.into(), None);
                    for (name, node) in names {
                        walk(model, node, &format!("{path}/{name}"), into);
                    }
                }
            }
        }
        let mut into = BTreeMap::new();
        walk(self, &self.root, "", &mut into);
        into
    }

    pub(crate) fn count(&self) -> usize {
        fn walk(node: &Node, files: &mut Vec<usize>) -> usize {
            match node {
                Node::File(number) => {
                    files.push(*number);
                    0
                }
                Node::Directory(names) => {
                    1 + names.values().map(|node| walk(node, files)).sum::<usize>()
                }
            }
        }
        let mut files = Vec::new();
        let directories = walk(&self.root, &mut files);
        files.sort_unstable();
        files.dedup();
        directories + files.len()
    }
}

pub(crate) type Path = Vec<String>;

#[derive(Clone, Debug)]
pub(crate) enum Action {
    Create(Path, bool),
    MakeDirectory(Path),
    MakeDirectories(Path),
    Link(Path, Path),
    Rename(Path, Path, bool),
    Unlink(Path),
    RemoveDirectory(Path),
    RemoveTree(Path),
    Report(Path, u64),
    SetLength(Path, u64),
}

pub(crate) fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]).prop_map(String::from), 1..4)
}

pub(crate) fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (path(), any::<bool>()).prop_map(|(path, exclusive)| Action::Create(path, exclusive)),
        3 => path().prop_map(Action::MakeDirectory),
        1 => path().prop_map(Action::MakeDirectories),
        1 => (path(), path()).prop_map(|(from, to)| Action::Link(from, to)),
        4 => (path(), path(), prop::bool::weighted(0.2))
            .prop_map(|(from, to, no_replace)| Action::Rename(from, to, no_replace)),
        1 => path().prop_map(Action::Unlink),
        1 => path().prop_map(Action::RemoveDirectory),
        1 => path().prop_map(Action::RemoveTree),
        1 => (path(), 0u64..5000).prop_map(|(path, length)| Action::Report(path, length)),
        1 => (path(), 0u64..5000).prop_map(|(path, length)| Action::SetLength(path, length)),
    ]
}

pub(crate) fn text(base: &str, path: &Path) -> String {
    // Equivalent spellings.
    format!("{base}/{}", path.join("//./"))
}

/// The change for an action on the tree below a directory.
pub(crate) async fn change_of(
    fixture: &Fixture,
    base: &str,
    action: &Action,
) -> Result<MetaChange, MetaError> {
    let text = |path: &Path| text(base, path);
    let at = |path: &Path| At::path(text(path));
    Ok(match action {
        Action::Create(path, exclusive) => {
            let (at, layout) = (at(path), Default::default());
            MetaChange::Create {
                at,
                mode: 0o644,
                exclusive: *exclusive,
                layout,
                write: false,
                track_open: false,
            }
        }
        Action::MakeDirectory(path) => make_directory(&text(path), false),
        Action::MakeDirectories(path) => make_directory(&text(path), true),
        Action::Link(from, to) => MetaChange::Link { from: at(from), to: at(to) },
        Action::Rename(from, to, no_replace) => MetaChange::Rename {
            from: at(from),
            to: at(to),
            mode: if *no_replace { RenameMode::NoReplace } else { RenameMode::Replace },
        },
        Action::Unlink(path) => MetaChange::Unlink { at: at(path) },
        Action::RemoveDirectory(path) => MetaChange::RemoveDirectory { at: at(path) },
        Action::RemoveTree(path) => MetaChange::RemoveTree { at: at(path) },
        Action::SetLength(path, length) => MetaChange::SetLength { at: at(path), length: *length },
        Action::Report(path, length) => {
            let inode = fixture.stat(&text(path)).await?;
            let crate::InodeKind::File { truncate_version, .. } = inode.kind else {
                return Err(MetaError::IsADirectory { path: text(path) });
            };
            let written = crate::Written::default();
            let report =
                LengthReport { inode: inode.id, length: *length, truncate_version, written };
            MetaChange::ReportLengths { reports: vec![report], ends: vec![] }
        }
    })
}

pub(crate) fn refusal(error: &MetaError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap_or_default().into()
}

async fn dump(fixture: &Fixture) -> BTreeMap<String, Option<u64>> {
    let mut into = BTreeMap::new();
    let mut open = vec![String::new()];
    while let Some(path) = open.pop() {
        into.insert(path.clone(), None);
        let mut after = String::new();
        loop {
            let list = MetaQuery::List { at: At::path(&path), after: after.clone(), limit: 2 };
            let MetaReply::Page { entries, more } = fixture.query(list).await.unwrap() else {
                panic!("no page")
            };
            for entry in &entries {
                let below = format!("{path}/{}", entry.name);
                match entry.kind {
                    crate::EntryKind::Directory => open.push(below),
                    _ => {
                        let length = fixture.stat(&below).await.unwrap().length();
                        into.insert(below, Some(length));
                    }
                }
                after.clone_from(&entry.name);
            }
            if !more {
                break;
            }
        }
    }
    into
}

/// Sends the changes to several services in turn, and each again to the next one.
async fn run(actions: Vec<Action>, services: usize) {
    let store = match services {
        1 => Store::memory(),
        _ => Store::shared_memory(),
    };
    let mut fixtures = Vec::new();
    for _ in 0..services {
        fixtures.push(Fixture::open(store.clone(), config()).await);
    }
    let mut model = Model::new();
    for (number, action) in actions.iter().enumerate() {
        let (fixture, other) = (&fixtures[number % services], &fixtures[(number + 1) % services]);
        let expected = model.apply(action);
        let result: MetaResult = match change_of(fixture, "", action).await {
            Err(error) => Err(error),
            Ok(change) => {
                let request =
                    MetaRequest::Change { id: fixture.next_id(), caller: Identity::ROOT, change };
                let first = fixture.tree.answer(request.clone(), soon()).await;
                // As after a lost reply: the same request again.
                let again = other.tree.answer(request, soon()).await;
                if first.is_ok() {
                    assert_eq!(first, again, "{action:?}: a retry was executed");
                }
                first
            }
        };
        let outcome = result.as_ref().map(drop).map_err(refusal);
        assert_eq!(outcome, expected.map_err(String::from), "{action:?} in {actions:?}");
    }
    for fixture in &fixtures {
        assert_eq!(dump(fixture).await, model.dump());
    }
    check_tree(&store).await;
    collect_with_all(&fixtures).await;
    check_tree(&store).await;
    assert_eq!(count_inodes(&store).await, model.count(), "after collecting");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn the_tree_matches_the_model(actions in prop::collection::vec(action(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(actions, 1));
    }

    #[test]
    fn the_tree_of_two_services_matches_the_model(
        actions in prop::collection::vec(action(), 1..40)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(actions, 2));
    }
}

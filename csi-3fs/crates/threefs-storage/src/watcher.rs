//! Threads that look at the paths of a service, one for each path: a mount that hangs blocks only its
//! own thread, and its path keeps the last result.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use threefs_core::disks::Found;
use threefs_core::ids::NodeId;
use tokio::sync::Notify;

use crate::found;

const INTERVAL: Duration = Duration::from_secs(1);

/// The paths of a service and what was found there last.
pub(crate) struct Watcher {
    /// In the order of the configuration.
    paths: Vec<String>,
    views: BTreeMap<String, (Arc<Mutex<View>>, Thread)>,
    changed: Arc<Notify>,
}

struct View {
    found: Found,
    /// The node of the new disk there, until its identity is written.
    adopt: Option<NodeId>,
}

impl Watcher {
    /// Starts a thread for each path. `first`: the path that has data of a release without
    /// identities, and its node.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn start(paths: &[PathBuf], first: NodeId) -> io::Result<Self> {
        let changed = Arc::new(Notify::new());
        let mut views = BTreeMap::new();
        for (number, path) in paths.iter().enumerate() {
            let found = Found::Unknown("it has not been read yet".into());
            let view = Arc::new(Mutex::new(View { found, adopt: None }));
            let (watched, folder) = (Arc::downgrade(&view), path.clone());
            let (changed, claim) = (Arc::clone(&changed), (number == 0).then_some(first));
            let thread = thread::Builder::new().name(format!("path-{number}"));
            let thread = thread.spawn(move || watch(&folder, &watched, &changed, claim))?;
            views.insert(path.display().to_string(), (view, thread.thread().clone()));
        }
        let paths = paths.iter().map(|path| path.display().to_string()).collect();
        Ok(Self { paths, views, changed })
    }

    /// The paths, in the order of the configuration.
    pub(crate) fn paths(&self) -> &[String] {
        &self.paths
    }

    /// What was found at each path last.
    pub(crate) fn found(&self) -> BTreeMap<String, Found> {
        let found = |(path, view): (&String, &(Arc<Mutex<View>>, _))| {
            (path.clone(), lock(&view.0).found.clone())
        };
        self.views.iter().map(found).collect()
    }

    /// Has an identity written on the new disk at a path, if it is still new.
    pub(crate) fn adopt(&self, path: &str, node: NodeId) {
        if let Some((view, thread)) = self.views.get(path) {
            lock(view).adopt = Some(node);
            thread.unpark();
        }
    }

    /// Returns when something else is found at a path.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Looks at a path until the watcher is dropped.
fn watch(
    path: &std::path::Path,
    view: &Weak<Mutex<View>>,
    changed: &Notify,
    first: Option<NodeId>,
) {
    let mut claim = first;
    while let Some(view) = view.upgrade() {
        // Fails while the folder is missing or unreadable.
        if let Some(node) = claim
            && found::claim_first(path, node).is_ok()
        {
            claim = None;
        }
        let adopt = lock(&view).adopt.take();
        let mut found = found::look(path);
        if let (Found::New, Some(node)) = (&found, adopt) {
            found = match found::adopt(path, node) {
                Ok(()) => found::look(path),
                Err(error) => Found::Unknown(format!("cannot write an identity: {error}")),
            };
        }
        let before = std::mem::replace(&mut lock(&view).found, found.clone());
        if before != found {
            changed.notify_one();
        }
        drop(view);
        thread::park_timeout(INTERVAL);
    }
}

fn lock(view: &Mutex<View>) -> MutexGuard<'_, View> {
    view.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::ClusterId;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    async fn until(watcher: &Watcher, condition: impl Fn(&BTreeMap<String, Found>) -> bool) {
        let wait = async {
            while !condition(&watcher.found()) {
                watcher.changed().await;
            }
        };
        tokio::time::timeout(LONG, wait).await.unwrap();
    }

    #[tokio::test]
    async fn a_new_disk_is_adopted_once_and_a_path_that_hangs_delays_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let [hanging, new] = ["hanging", "new"].map(|name| folder.path().join(name));
        for path in [&hanging, &new] {
            std::fs::create_dir(path).unwrap();
        }
        std::fs::write(new.join("adopt"), "").unwrap();
        let fifo = hanging.join("identity.json");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        let watcher = Watcher::start(&[hanging.clone(), new.clone()], NodeId(3)).unwrap();
        let [hanging, new] = [hanging, new].map(|path| path.display().to_string());
        until(&watcher, |found| found[&new] == Found::New).await;
        watcher.adopt(&new, NodeId(1_000_003));
        until(&watcher, |found| matches!(found[&new], Found::Disk(_))).await;
        let before = watcher.found();
        assert!(matches!(before[&hanging], Found::Unknown(_)));
        // A request that was made before the disk was found: its identity is not replaced.
        watcher.adopt(&new, NodeId(2_000_003));
        while lock(&watcher.views[&new].0).adopt.is_some() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        crate::identity::write(new.as_ref(), ClusterId(7)).unwrap();
        until(&watcher, |found| found[&new] != before[&new]).await;
        let Found::Disk(disk) = &watcher.found()[&new] else { panic!() };
        assert_eq!((disk.node, disk.cluster), (NodeId(1_000_003), Some(ClusterId(7))));
        // Ends the read that hangs.
        drop(std::fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap());
        until(&watcher, |found| found[&hanging] != before[&hanging]).await;
    }
}

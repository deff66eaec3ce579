//! Isolation of volume credentials: a hostile client claims to be root, knows paths and inode numbers
//! of other volumes, and tries each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use fabric::auth::ticket::{Grant, Ticket};
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::Store;

use crate::identity::Identity;
use crate::permission::WRITE;
use crate::protocol::{
    At, BATCH_MAX, Inode, InodeKind, LayoutDefaults, LengthReport, MetaChange, MetaError,
    MetaQuery, MetaReply, MetaRequest, MetaResult, RenameMode, Reservation, SessionId, SetMode,
};
use crate::tests::backends::MostReads;
use crate::tests::fixture::{Fixture, config, create, make_directory, rename, soon};

/// `/volumes/a` and `/volumes/b` with quotas; `/volumes/plain` without one.
pub(super) struct Volumes {
    pub(super) fixture: Fixture,
    pub(super) a: Inode,
    b: Inode,
    pub(super) secret: Inode,
}

impl Volumes {
    pub(super) async fn new() -> Self {
        Self::of(Fixture::memory().await).await
    }

    async fn of(fixture: Fixture) -> Self {
        fixture.make_directory("/volumes/plain").await;
        let a = fixture.make_directory("/volumes/a").await;
        let b = fixture.make_directory("/volumes/b").await;
        for path in ["/volumes/a", "/volumes/b"] {
            let at = At::path(path);
            let quota = MetaChange::SetQuota { at, bytes_max: Some(1 << 30), inodes_max: None };
            fixture.change(quota).await.unwrap();
        }
        fixture.make_directory("/volumes/a/data/deep").await;
        fixture.make_directory("/volumes/b/data").await;
        let secret = fixture.create("/volumes/b/data/secret").await;
        Self { fixture, a, b, secret }
    }

    pub(super) fn grant(&self, directory: InodeId, read_only: bool) -> Grant {
        Grant::Volume(Arc::new(Ticket {
            cluster: "default".into(),
            key_id: 0,
            directory: directory.0,
            path: "/volumes/a".into(),
            read_only,
            node: String::new(),
            expires_unix_s: u64::MAX,
        }))
    }

    pub(super) async fn query(&self, query: MetaQuery) -> MetaResult {
        let request = MetaRequest::Query { caller: Identity::CONTROL_PLANE, query };
        self.fixture.tree.answer_for(&self.grant(self.a.id, false), request, soon()).await
    }

    pub(super) async fn change(&self, change: MetaChange) -> MetaResult {
        self.change_with(&self.grant(self.a.id, false), change).await
    }

    pub(super) async fn change_with(&self, grant: &Grant, change: MetaChange) -> MetaResult {
        let id = self.fixture.next_id();
        let request = MetaRequest::Change { id, caller: Identity::CONTROL_PLANE, change };
        self.fixture.tree.answer_for(grant, request, soon()).await
    }

    async fn stat(&self, at: At) -> Result<InodeId, MetaError> {
        match self.query(MetaQuery::Stat { at, follow: true }).await? {
            MetaReply::Inode(inode) => Ok(inode.id),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn is_refused<T: std::fmt::Debug>(result: Result<T, MetaError>) {
    assert!(
        matches!(result, Err(MetaError::PermissionDenied { .. } | MetaError::NotPermitted { .. })),
        "{result:?}"
    );
}

fn is_refused_in_batch(result: MetaResult) {
    match result {
        Ok(MetaReply::Inodes(inodes)) if inodes.len() == 1 => is_refused(inodes[0].clone()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_directory_of_the_credential_is_its_root() {
    let volumes = Volumes::new().await;
    assert_eq!(volumes.stat(At::path("/")).await.unwrap(), volumes.a.id);
    assert_eq!(volumes.stat(At::path("")).await.unwrap(), volumes.a.id);
    let reply = volumes.change(create("/data/file")).await.unwrap();
    let MetaReply::Opened { inode, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(volumes.fixture.stat("/volumes/a/data/file").await.unwrap().id, inode.id);
    assert_eq!(volumes.stat(At::inode(inode.id)).await.unwrap(), inode.id);
    // Any number of `..` stays inside.
    for path in ["..", "/..", "/../..", "/data/../..", "/data/../../../..", "data/deep/../../.."] {
        assert_eq!(volumes.stat(At::path(path)).await.unwrap(), volumes.a.id, "{path}");
    }
    for path in ["/volumes/b", "/../b", "/data/../../b/data/secret"] {
        let missing = volumes.stat(At::path(path)).await;
        assert!(matches!(missing, Err(MetaError::NotFound { .. })), "{path}: {missing:?}");
    }
}

#[tokio::test]
async fn inodes_of_other_volumes_are_refused() {
    let volumes = Volumes::new().await;
    let plain = volumes.fixture.stat("/volumes/plain").await.unwrap().id;
    let above = volumes.fixture.stat("/volumes").await.unwrap().id;
    for foreign in [volumes.b.id, volumes.secret.id, plain, above] {
        is_refused(volumes.stat(At::inode(foreign)).await);
        let (at, after) = (At::inode(foreign), String::new());
        is_refused(volumes.query(MetaQuery::List { at, after, limit: 0 }).await);
        is_refused(volumes.query(MetaQuery::Quotas { at: At::inode(foreign) }).await);
        let (at, client) = (At::inode(foreign), ClientId(1));
        is_refused(volumes.query(MetaQuery::Open { at, access: 4, client }).await);
        let (inode, session, truncate_version) = (foreign, SessionId(1), 0);
        let written = crate::Written::default();
        let report = LengthReport { inode, length: 1 << 40, truncate_version, written };
        let reports = vec![report];
        let lengths = MetaChange::ReportLengths { reports, ends: vec![] };
        is_refused_in_batch(volumes.change(lengths).await);
        let close = MetaChange::Close { inode: foreign, session, report: None };
        is_refused(volumes.change(close).await);
        let reservation = Reservation { inode, session, end: 1 << 20, truncate_version };
        let reservations = vec![reservation];
        is_refused_in_batch(volumes.change(MetaChange::Reserve { reservations }).await);
        is_refused(
            volumes.change(MetaChange::SetLength { at: At::inode(foreign), length: 0 }).await,
        );
        let away = At::entry(foreign, "x");
        let mode = RenameMode::Replace;
        let from = At::path("/data/deep");
        is_refused(volumes.change(MetaChange::Rename { from, to: away.clone(), mode }).await);
        is_refused(volumes.change(MetaChange::RemoveTree { at: away.clone() }).await);
        is_refused(volumes.change(MetaChange::Unlink { at: away.clone() }).await);
        is_refused(volumes.change(MetaChange::MakeSymlink { at: away, target: "x".into() }).await);
        let (from, to) = (At::inode(foreign), At::path("/data/stolen"));
        is_refused(volumes.change(MetaChange::Link { from, to }).await);
    }
    let query = MetaQuery::StatMany { at: vec![At::inode(volumes.secret.id), At::path("/data")] };
    let MetaReply::Inodes(inodes) = volumes.query(query).await.unwrap() else { panic!() };
    is_refused(inodes[0].clone());
    assert!(inodes[1].is_ok());
}

#[tokio::test]
async fn one_foreign_file_in_a_batch_does_not_affect_the_others() {
    let volumes = Volumes::new().await;
    let mut own = Vec::new();
    for path in ["/data/one", "/data/two"] {
        let reply = volumes.change(create(path)).await.unwrap();
        let MetaReply::Opened { inode, .. } = reply else { panic!("{reply:?}") };
        own.push(inode.id);
    }
    let reports = [own[0], volumes.secret.id, own[1], volumes.b.id].map(|inode| LengthReport {
        inode,
        length: 5,
        truncate_version: 0,
        written: crate::Written::default(),
    });
    let reports = reports.to_vec();
    let reply = volumes.change(MetaChange::ReportLengths { reports, ends: vec![] }).await.unwrap();
    let MetaReply::Inodes(inodes) = reply else { panic!("{reply:?}") };
    assert_eq!(inodes.len(), 4);
    for (position, id) in [(0, own[0]), (2, own[1])] {
        let inode = inodes[position].as_ref().unwrap();
        assert_eq!((inode.id, inode.length()), (id, 5));
    }
    is_refused(inodes[1].clone());
    is_refused(inodes[3].clone());
}

#[tokio::test]
async fn sessions_of_files_elsewhere_are_not_ended() {
    let volumes = Volumes::new().await;
    let reply = volumes.change(create("/data/own")).await.unwrap();
    let MetaReply::Opened { inode: own, .. } = reply else { panic!("{reply:?}") };
    let (session, end, truncate_version) = (SessionId(7), 1 << 20, 0);
    for inode in [own.id, volumes.secret.id] {
        let reservations = vec![Reservation { inode, session, end, truncate_version }];
        volumes.fixture.change(MetaChange::Reserve { reservations }).await.unwrap();
    }
    // Even by a client that knows their names.
    let ends = vec![(own.id, session), (volumes.secret.id, session)];
    volumes.change(MetaChange::ReportLengths { reports: vec![], ends }).await.unwrap();
    for (path, expected) in [("/volumes/a/data/own", 0), ("/volumes/b/data/secret", end)] {
        let InodeKind::File { reserved, .. } = volumes.fixture.stat(path).await.unwrap().kind
        else {
            panic!("{path} is not a file")
        };
        assert_eq!(reserved, expected, "{path}");
    }
    let ends = vec![(own.id, session); BATCH_MAX + 1];
    let many = volumes.change(MetaChange::ReportLengths { reports: vec![], ends }).await;
    assert!(many.is_err(), "{many:?}");
}

#[tokio::test]
async fn a_recreated_volume_refuses_credentials_of_the_former_one() {
    let volumes = Volumes::new().await;
    let reply = volumes.change(create("/data/former")).await.unwrap();
    let MetaReply::Opened { inode: former, .. } = reply else { panic!("{reply:?}") };
    let at = At::path("/volumes/a");
    volumes.fixture.change(MetaChange::RemoveTree { at: at.clone() }).await.unwrap();
    let assert_not_found = |result: Result<InodeId, MetaError>| {
        assert!(matches!(result, Err(MetaError::NotFound { .. })), "{result:?}");
    };
    // At once: continuous creation of files must not prevent the collection.
    assert_not_found(volumes.stat(At::path("/")).await);
    assert_not_found(volumes.stat(At::inode(former.id)).await);
    for path in ["/more", "/data/more"] {
        assert!(volumes.change(create(path)).await.is_err(), "{path}");
    }
    let sides = volumes.fixture.tree.sides(volumes.a.id, &[former.id], soon()).await.unwrap();
    assert!(sides.inside.is_empty(), "no capability for what was in it");
    volumes.fixture.collect_all().await;
    let again = volumes.fixture.make_directory("/volumes/a").await;
    let quota = MetaChange::SetQuota { at, bytes_max: Some(1 << 30), inodes_max: None };
    volumes.fixture.change(quota).await.unwrap();
    let secret = volumes.fixture.create("/volumes/a/secret").await;
    assert_ne!(again.id, volumes.a.id);
    let inodes = [former.id, again.id, secret.id].map(At::inode);
    for at in [At::path("/"), At::path("/secret")].into_iter().chain(inodes) {
        assert_not_found(volumes.stat(at).await);
    }
    assert!(volumes.change(create("/more")).await.is_err());
}

#[tokio::test]
async fn inodes_outside_the_volume_cannot_be_held() {
    let volumes = Volumes::new().await;
    // Existing inodes of other volumes, and future inode numbers.
    let add: Vec<InodeId> = (0..200).map(|more| InodeId(volumes.secret.id.0 + more)).collect();
    let report_open =
        MetaQuery::ReportOpenFiles { client: ClientId(1), add, release: Vec::new(), all: true };
    volumes.query(report_open).await.unwrap();
    let later = volumes.fixture.create("/volumes/b/data/later").await;
    for path in ["/volumes/b/data/secret", "/volumes/b/data/later"] {
        let at = At::path(path);
        volumes.fixture.change(MetaChange::Unlink { at }).await.unwrap();
    }
    volumes.fixture.collect_all().await;
    for victim in [volumes.secret.id, later.id] {
        let at = At::inode(victim);
        let result = volumes.fixture.query(MetaQuery::Stat { at, follow: false }).await;
        assert!(matches!(result, Err(MetaError::NotFound { .. })), "{result:?}");
    }
}

#[tokio::test]
async fn links_out_of_the_volume_are_refused_or_resolved_inside_it() {
    let volumes = Volumes::new().await;
    let link = |path: &str, target: &str| MetaChange::MakeSymlink {
        at: At::path(path),
        target: target.into(),
    };
    volumes.change(link("/data/up", "../../b/data/secret")).await.unwrap();
    volumes.change(link("/data/climb", "../../..")).await.unwrap();
    volumes.change(link("/data/absolute", "/volumes/b/data/secret")).await.unwrap();
    volumes.change(link("/data/root", "/")).await.unwrap();
    volumes.change(link("/data/within", "../data/deep")).await.unwrap();
    for path in ["/data/up", "/data/climb", "/data/climb/volumes/b"] {
        is_refused(volumes.stat(At::path(path)).await);
    }
    let absolute = volumes.stat(At::path("/data/absolute")).await;
    assert!(matches!(absolute, Err(MetaError::NotFound { .. })), "{absolute:?}");
    assert_eq!(volumes.stat(At::path("/data/root")).await.unwrap(), volumes.a.id);
    assert!(volumes.stat(At::path("/data/within")).await.is_ok());
    is_refused(volumes.change(create("/data/up")).await);
}

#[tokio::test]
async fn control_plane_requests_require_the_cluster_key() {
    let volumes = Volumes::new().await;
    let at = At::path("/");
    is_refused(volumes.query(MetaQuery::Status).await);
    is_refused(volumes.query(MetaQuery::Role).await);
    is_refused(volumes.query(MetaQuery::PathOf { directory: volumes.a.id }).await);
    let quota = MetaChange::SetQuota { at: at.clone(), bytes_max: None, inodes_max: None };
    is_refused(volumes.change(quota).await);
    let set = |at: &At, name: &str| MetaChange::SetAttribute {
        at: at.clone(),
        name: name.into(),
        value: Some(b"1 node".to_vec()),
        mode: SetMode::Any,
    };
    is_refused(volumes.change(set(&at, "user.threefs.volume")).await);
    is_refused(volumes.change(set(&At::path("/data"), "user.threefs.claim")).await);
    volumes.change(set(&at, "user.threefs.claim")).await.unwrap();
    volumes.change(set(&at, "user.mine")).await.unwrap();
    let names = volumes.query(MetaQuery::ListAttributes { at: at.clone() }).await.unwrap();
    assert_eq!(names, MetaReply::Names(vec!["user.mine".into()]));
    for at in [at.clone(), At::inode(volumes.a.id)] {
        let root = volumes.change(MetaChange::RemoveTree { at }).await;
        assert!(matches!(root, Err(MetaError::IsRoot { .. })), "{root:?}");
    }
}

#[tokio::test]
async fn quotas_above_the_directory_are_not_shown() {
    let volumes = Volumes::new().await;
    let at = At::path("/volumes");
    let quota = MetaChange::SetQuota { at, bytes_max: Some(1 << 40), inodes_max: None };
    volumes.fixture.change(quota).await.unwrap();
    let all = volumes.fixture.query(MetaQuery::Quotas { at: At::path("/volumes/a") }).await;
    let Ok(MetaReply::Quotas(all)) = all else { panic!("{all:?}") };
    assert_eq!(all.len(), 2);
    let reply = volumes.query(MetaQuery::Quotas { at: At::path("/data") }).await;
    let Ok(MetaReply::Quotas(quotas)) = reply else { panic!("{reply:?}") };
    assert_eq!(quotas.iter().map(|quota| quota.directory).collect::<Vec<_>>(), [volumes.a.id]);
}

#[tokio::test]
async fn quotas_within_the_directory_are_part_of_it() {
    let volumes = Volumes::new().await;
    let at = At::path("/volumes/a/data/deep");
    let quota = MetaChange::SetQuota { at, bytes_max: Some(1 << 20), inodes_max: None };
    volumes.fixture.change(quota).await.unwrap();
    let file = volumes.fixture.create("/volumes/a/data/deep/file").await;
    assert_eq!(volumes.stat(At::inode(file.id)).await.unwrap(), file.id);
}

#[tokio::test]
async fn a_read_only_credential_changes_nothing() {
    let volumes = Volumes::new().await;
    let grant = volumes.grant(volumes.a.id, true);
    let at = At::path("/data/deep");
    for change in [
        create("/data/file"),
        make_directory("/data/more", true),
        rename("/data/deep", "/data/other"),
        MetaChange::Open { at: at.clone(), write: true },
        MetaChange::RemoveTree { at: at.clone() },
        MetaChange::SetAttributes {
            at: at.clone(),
            follow: true,
            mode: Some(0o777),
            uid: None,
            gid: None,
            accessed: None,
            modified: None,
        },
    ] {
        is_refused(volumes.change_with(&grant, change).await);
    }
    let open = MetaQuery::Open { at, access: WRITE, client: ClientId(1) };
    let request = MetaRequest::Query { caller: Identity::ROOT, query: open };
    is_refused(volumes.fixture.tree.answer_for(&grant, request, soon()).await);
}

#[tokio::test]
async fn a_directory_without_a_quota_is_refused_with_the_remedy() {
    let volumes = Volumes::new().await;
    let plain = volumes.fixture.stat("/volumes/plain").await.unwrap().id;
    let change = MetaChange::MakeDirectory {
        at: At::path("/x"),
        mode: 0o755,
        parents: false,
        defaults: LayoutDefaults::default(),
    };
    let error = volumes.change_with(&volumes.grant(plain, false), change).await.unwrap_err();
    assert!(error.to_string().contains("set_quota"), "{error}");
}

#[test]
fn a_client_cannot_send_a_scope() {
    let caller = Identity { scope: Some(InodeId(7)), ..Identity::ROOT };
    let bytes = fabric::rpc::encode(&caller).unwrap();
    let read: Identity = fabric::rpc::decode(&bytes).unwrap();
    assert_eq!(read, Identity::ROOT);
}

/// A list may be as long as a message: no transaction looks up all of it.
#[tokio::test]
async fn a_long_list_of_open_files_is_looked_up_in_parts() {
    let most = Arc::new(AtomicU64::new(0));
    let store = Store::new(MostReads(Store::memory(), Arc::clone(&most)));
    let volumes = Volumes::of(Fixture::open(store, config()).await).await;
    let mut inside = Vec::new();
    for number in 0..5 {
        inside.push(volumes.fixture.create(&format!("/volumes/a/data/{number}")).await.id);
    }
    let mut add: Vec<InodeId> = (10_000..20_000).map(InodeId).collect();
    for (number, inode) in inside.iter().chain([&volumes.secret.id]).enumerate() {
        add.insert(number * 1_900, *inode);
    }
    most.store(0, SeqCst);
    let (client, release) = (ClientId(1), add[..1].to_vec());
    let report_open = MetaQuery::ReportOpenFiles { client, add, release, all: true };
    let reply = volumes.query(report_open).await.unwrap();
    assert_eq!(reply, MetaReply::OpenFilesReported { complete: true });
    let reads = most.load(SeqCst);
    assert!((1..=2 * BATCH_MAX as u64).contains(&reads), "{reads} reads in one transaction");
    let open_files = &volumes.fixture.tree.open_files;
    assert!(inside[1..].iter().all(|inode| open_files.is_open(*inode)));
    assert!(!open_files.is_open(inside[0]) && !open_files.is_open(volumes.secret.id));
    assert!(!open_files.is_open(InodeId(10_000)), "it may become another volume's");
}

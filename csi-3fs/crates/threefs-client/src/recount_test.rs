//! Tests of bytes that a ticket holder stores but does not report, with real chains.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::auth::Key;
use fabric::auth::keys::KeyRing;
use fabric::auth::ticket::{SealedTicket, Ticket};
use fabric::deadline::Deadline;
use fabric::rpc::Shutdown;
use threefs_core::ids::InodeId;
use threefs_meta::{
    At, Inode, Meta, MetaChange, MetaConfig, MetaQuery, MetaReply, Reservation, SessionId,
    TreeConfig,
};

use crate::cluster_test::{Cluster, whole};
use crate::{Client, ClientConfig, ClientError, FileHandle, WriteRange};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(120);

fn key() -> Key {
    Key::from_bytes(&[7; 32]).unwrap()
}

fn ticket(directory: InodeId) -> SealedTicket {
    let (cluster, path, node) = ("default".into(), "/v".into(), String::new());
    let (key_id, directory, read_only) = (0, directory.0, false);
    let expires_unix_s = u64::MAX;
    let ticket = Ticket { cluster, key_id, directory, path, read_only, node, expires_unix_s };
    ticket.seal(&KeyRing::of(key())).unwrap()
}

async fn used(control: &Client) -> u64 {
    match control.query("look at", "/v", MetaQuery::Quotas { at: At::path("/v") }).await.unwrap() {
        MetaReply::Quotas(quotas) => quotas[0].bytes_used,
        other => panic!("{other:?}"),
    }
}

async fn until_used(control: &Client, expected: u64) {
    let deadline = Deadline::after(LONG);
    while used(control).await != expected {
        assert!(
            !deadline.passed(),
            "{} bytes are charged, expected {expected}",
            used(control).await
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn reserve(tenant: &Client, file: &Inode, end: u64) {
    let session = SessionId(1);
    let reservation = Reservation { inode: file.id, session, end, truncate_version: 0 };
    let change = MetaChange::Reserve { reservations: vec![reservation] };
    tenant.change("reserve for", "file", change).await.unwrap();
}

/// Ends the session without a report, as a malicious client would.
async fn end(tenant: &Client, file: &Inode) {
    let (reports, ends) = (Vec::new(), vec![(file.id, SessionId(1))]);
    let change = MetaChange::ReportLengths { reports, ends };
    tenant.change("end the session of", "file", change).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreported_bytes_are_charged_and_kept() {
    let cluster = Cluster::of_three(64 << 20).await;
    let folder = tempfile::tempdir().unwrap();
    let trimmer = cluster.client();
    whole(&trimmer).await;
    let config = MetaConfig {
        listen: "127.0.0.1:0".into(),
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_meta::StoreConfig::folder(folder.path().join("meta")),
        mgmtd: vec![cluster.mgmtd.clone()],
        tree: TreeConfig { recount_wait_ms: 1, gc_delay_ms: 1, ..TreeConfig::default() },
    };
    let meta = Meta::open(config, Arc::new(trimmer)).await.unwrap();
    let address = meta.address().to_string();
    let (_handle, shutdown) = Shutdown::new();
    tokio::spawn(meta.serve(shutdown));
    let client = |credentials: fabric::auth::credentials::Credentials| {
        let config =
            ClientConfig::new(vec![cluster.mgmtd.clone()], vec![address.clone()], credentials);
        Client::start(ClientConfig { timeout: LONG, ..config })
    };
    let control = client(key().into());
    control.mkdir("/v", false).await.unwrap();
    let volume = control.stat("/v", true).await.unwrap().id;
    let (bytes_max, inodes_max) = (Some(64 * MIB), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    control.change("limit", "/v", quota).await.unwrap();

    let tenant = client(ticket(volume).into());
    let handle = tenant.create("/file", true).await.unwrap();
    let file = tenant.stat("/file", true).await.unwrap();
    reserve(&tenant, &file, 30 * MIB).await;
    assert_eq!(used(&control).await, 30 * MIB);
    // A chunk in the middle, up to 5 bytes behind the fourth MiB.
    let write = async |who: &Client, handle: &FileHandle, offset, bytes: usize| {
        let deadline = Deadline::after(LONG);
        who.write_range(handle, offset, Bytes::from(vec![7; bytes]), deadline).await
    };
    write(&tenant, &handle, 3 * MIB, MIB as usize + 5).await.unwrap();
    end(&tenant, &file).await;
    until_used(&control, 4 * MIB + 5).await;
    assert_eq!(control.stat("/v/file", true).await.unwrap().length(), 0);
    // A new capability allows no write without a reservation.
    let second = client(ticket(volume).into());
    let error = write(&second, &handle, 0, 1).await.unwrap_err();
    assert!(matches!(error, ClientError::NotReserved { .. }), "{error}");
    let end_of_two = 2 * MIB;
    reserve(&second, &file, end_of_two).await;
    write(&second, &handle, 0, 1).await.unwrap();
    let error = write(&second, &handle, end_of_two - 1, 2).await.unwrap_err();
    assert!(matches!(error, ClientError::NotReserved { .. }), "{error}");
    // No acknowledged data is lost: it is visible once the file is extended.
    control.set_length(&handle, 4 * MIB + 5).await.unwrap();
    let read = control
        .read_range(&handle, 3 * MIB, MIB + 5, Deadline::after(LONG))
        .await
        .unwrap()
        .concat();
    assert!(
        read.len() as u64 == MIB + 5 && read.iter().all(|byte| *byte == 7),
        "acknowledged data is present"
    );
    end(&second, &file).await;
    tenant.unlink("/file").await.unwrap();
    until_used(&control, 0).await;

    // A refused file of a batch leaves no reservation of the others.
    let range = |path: &str, offset, bytes| WriteRange {
        path: path.into(),
        offset,
        payload: Bytes::from(vec![7; bytes]),
    };
    tenant.batch_write(vec![range("/kept", 0, 4)], true).await.unwrap();
    until_used(&control, 4).await;
    let writes = vec![range("/kept", 0, MIB as usize), range("/too-large", 1 << 60, 1)];
    let error = tenant.batch_write(writes, true).await.unwrap_err();
    assert!(!matches!(error, ClientError::NotReserved { .. }), "{error}");
    until_used(&control, 4).await;
}

//! Reports of usage over real sockets.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::load::{hold_memory, narrow, of_volume, open, send, serve};
use super::rpc_test::{self, CONTEXT, key, soon};
use crate::rpc::server::{USAGE_CLASS, USAGE_REQUEST};
use crate::rpc::*;

fn pool(address: &str) -> Pool {
    Pool::new(address, PoolConfig::new(ConnectionConfig::new(CONTEXT, key())))
}

#[tokio::test]
async fn a_holder_of_the_key_sees_the_calls_of_each_caller() {
    let running = serve(|_| {}).await;
    let (volume, service) = (of_volume(&running, 7).await.unwrap(), pool(&running.address));
    assert_eq!(service.usage(soon()).await.unwrap(), Usage::default());
    for _ in 0..10 {
        let payload: Payload = Bytes::from(vec![1; 1000]).into();
        send(&volume, b"abcd", payload, 0, soon()).await.unwrap();
    }
    let usage = service.usage(soon()).await.unwrap();
    assert!(usage.elapsed_ms.is_some());
    let caller = Caller { volume: Some(7), path: "/volumes/a".into(), host: "127.0.0.1".into() };
    let count = Count { operations: 10, received_bytes: 10 * 1004, sent_bytes: 10 * 4 };
    assert_eq!(usage.callers, [(caller, BTreeMap::from([(0, count)]))]);
    // Reports are not calls, and each reader has what happened since its previous report.
    let another = pool(&running.address);
    for reader in [&service, &another] {
        assert_eq!(reader.usage(soon()).await.unwrap().callers, []);
    }
}

/// An overloaded server is the one whose callers an administrator looks for.
#[tokio::test]
async fn a_server_without_free_calls_reports() {
    let running = serve(|config| {
        narrow(config);
        config.budgets.iter_mut().for_each(|budget| budget.calls_max = 1);
    })
    .await;
    let held = hold_memory(&running, 0).await;
    let refused = send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await;
    assert!(matches!(refused, Err(RpcError::Faulted { .. })), "{refused:?}");
    pool(&running.address).usage(soon()).await.unwrap();
    running.gate.add_permits(1);
    held.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_tenant_sees_no_report() {
    let running = serve(|_| {}).await;
    let volume = of_volume(&running, 7).await.unwrap();
    for body in [0, DIRECT_BYTES_MAX] {
        let payload: Payload = Bytes::from(vec![0; body]).into();
        let error = send(&volume, &USAGE_REQUEST, payload, USAGE_CLASS, soon()).await.unwrap_err();
        let forbidden = |fault: &Fault| fault.code == FaultCode::Forbidden;
        assert!(matches!(&error, RpcError::Faulted { fault, .. } if forbidden(fault)), "{error}");
    }
    // Its connection stays open.
    send(&volume, b"x", Payload::empty(), 0, soon()).await.unwrap();
}

/// A report after a restart of the server has no counters: its numbers have another origin.
#[tokio::test]
async fn a_restarted_server_is_not_compared_with_the_former_one() {
    let former = rpc_test::serve_default().await;
    let service = pool(&former.address);
    service.usage(soon()).await.unwrap();
    assert!(service.usage(soon()).await.unwrap().elapsed_ms.is_some());
    former.handle.request();
    former.task.await.unwrap();
    let _restarted = rpc_test::serve(&former.address, |_| {}).await;
    let usage = loop {
        // The first attempt may be the one that finds the connection closed.
        if let Ok(usage) = service.usage(soon()).await {
            break usage;
        }
    };
    assert_eq!(usage, Usage::default());
}

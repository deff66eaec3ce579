//! Reports of usage over real sockets.

use bytes::Bytes;

use super::load::{of_volume, open, send, serve};
use super::rpc_test::soon;
use crate::rpc::*;

async fn report(connection: &Connection) -> Result<Usage, RpcError> {
    let reply = send(connection, b"usage", Payload::empty(), USAGE_CLASS, soon()).await?;
    decode(&reply.message)
}

#[tokio::test]
async fn a_holder_of_the_key_sees_the_calls_of_each_caller() {
    let running = serve(|_| {}).await;
    let (volume, service) = (of_volume(&running, 7).await.unwrap(), open(&running).await);
    for _ in 0..10 {
        let payload: Payload = Bytes::from(vec![1; 1000]).into();
        send(&volume, b"abcd", payload, 0, soon()).await.unwrap();
    }
    let before = report(&service).await.unwrap();
    let (caller, counts) = &before.callers[0];
    let expected = Caller { volume: Some(7), path: "/volumes/a".into(), host: "127.0.0.1".into() };
    assert_eq!(*caller, expected);
    // The first call of the connection is the one of `of_volume`.
    let count = Count { operations: 11, received_bytes: 10 * 1004 + 1, sent_bytes: 10 * 4 + 1 };
    assert_eq!(*counts, Counts::from([(0, count)]));
    // Reports are not calls.
    assert_eq!(report(&service).await.unwrap(), before);
}

#[tokio::test]
async fn a_tenant_sees_no_report() {
    let running = serve(|_| {}).await;
    let volume = of_volume(&running, 7).await.unwrap();
    let error = report(&volume).await.unwrap_err();
    let forbidden = |fault: &Fault| fault.code == FaultCode::Forbidden;
    assert!(matches!(&error, RpcError::Faulted { fault, .. } if forbidden(fault)), "{error}");
    // Its connection stays open.
    send(&volume, b"x", Payload::empty(), 0, soon()).await.unwrap();
}

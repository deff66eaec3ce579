//! Offers of memory by a hostile server.

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;

fn send(socket: &UnixStream, message: &[u8], descriptors: &[rustix::fd::BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::empty());
    assert_eq!(sent.unwrap(), message.len());
}

fn memory(bytes: usize, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("offer", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[tokio::test]
async fn an_offer_must_be_sealed_memory_of_its_size() {
    let sealed = SealFlags::SHRINK | SealFlags::SEAL;
    let capacity = 64 << 10;
    let good = memory(link_bytes(capacity), sealed);
    let loose = memory(link_bytes(capacity), SealFlags::SEAL);
    let short = memory(link_bytes(capacity) - 4096, sealed);
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let said = |capacity: u32| capacity.to_le_bytes();
    for (message, descriptors, is_good) in [
        (said(64 << 10), vec![&good], true),
        (said(64 << 10), vec![&loose], false),
        (said(64 << 10), vec![&short], false),
        (said(64 << 10), vec![&file], false),
        (said(64 << 10), vec![], false),
        (said(64 << 10), vec![&good, &good], false),
        (said(0), vec![&good], false),
        (said((64 << 10) - 1), vec![&good], false),
        (said(u32::MAX), vec![&good], false),
        (said(1 << 31), vec![&good], false),
    ] {
        let (server, client) = UnixStream::pair().unwrap();
        let borrowed: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        send(&server, &message, &borrowed);
        let result = receive_offer(client).await;
        assert_eq!(result.is_ok(), is_good, "{message:?} with {} descriptors", borrowed.len());
    }
    let (server, client) = UnixStream::pair().unwrap();
    drop(server);
    assert!(receive_offer(client).await.unwrap().is_none(), "no memory: TCP");
}

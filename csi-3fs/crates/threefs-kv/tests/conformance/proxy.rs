//! A TCP proxy that loses the reply to a commit and cuts the connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request of this size is a commit, if it writes values: others are smaller.
pub(crate) const COMMIT_BYTES_MIN: usize = 2000;

pub(crate) struct Proxy {
    address: SocketAddr,
    armed: Arc<AtomicBool>,
    cuts: Arc<AtomicU64>,
}

impl Proxy {
    pub(crate) async fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (armed, cuts) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (server, state) = (server.to_owned(), (Arc::clone(&armed), Arc::clone(&cuts)));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                tokio::spawn(forward(client, server, state.clone()));
            }
        });
        Self { address, armed, cuts }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn cut_next_reply_to_a_commit(&self) {
        self.armed.store(true, SeqCst);
    }

    /// Replies that were lost.
    pub(crate) fn cuts(&self) -> u64 {
        self.cuts.load(SeqCst)
    }
}

async fn forward(
    mut client: TcpStream,
    mut server: TcpStream,
    (armed, cuts): (Arc<AtomicBool>, Arc<AtomicU64>),
) {
    let (mut request, mut reply) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            count = client.read(&mut request) => {
                let Ok(count @ 1..) = count else { return };
                if server.write_all(&request[..count]).await.is_err() {
                    return;
                }
                if count >= COMMIT_BYTES_MIN && armed.swap(false, SeqCst) {
                    // The request has been sent: half of the replies are awaited, so that etcd
                    // executes it; the others are cut at once.
                    if cuts.fetch_add(1, SeqCst) % 2 == 0 {
                        let _ = server.read(&mut reply).await;
                    }
                    return;
                }
            }
            count = server.read(&mut reply) => {
                let Ok(count @ 1..) = count else { return };
                if client.write_all(&reply[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}

//! Real etcd clusters of `FIRE_FLYER_ETCD`, which `make test-services` sets.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};
use threefs_kv::EtcdConfig;

pub(crate) const BINARY: &str = "FIRE_FLYER_ETCD";
/// Bounds that the backend requires.
pub(crate) const BOUNDS: [&str; 2] = ["--max-txn-ops=8192", "--max-request-bytes=8388608"];
/// Starts etcd, prints its process id, and kills it when the test process ends for any reason.
const GUARD: &str = r#"folder=$1; shift; "$@" </dev/null >"$folder.log" 2>&1 & echo $!
read -r _; kill -9 $!; wait; rm -rf "$folder" "$folder.log""#;

pub(crate) struct Member {
    pub endpoint: String,
    arguments: Vec<String>,
    folder: PathBuf,
    guard: Option<(Child, ChildStdin, Pid)>,
}

/// Members that end with this value, or with the process.
pub(crate) struct Cluster {
    pub members: Vec<Member>,
    next: AtomicU64,
}

impl Cluster {
    /// Starts members; `None`, with a line, without the program.
    pub(crate) fn start(size: usize, options: &[&str]) -> Option<Self> {
        Self::start_with("http", size, options)
    }

    /// As [`Cluster::start`], with the scheme of the clients' endpoints.
    pub(crate) fn start_with(scheme: &str, size: usize, options: &[&str]) -> Option<Self> {
        let Some(binary) = std::env::var(BINARY).ok().filter(|path| !path.is_empty()) else {
            eprintln!("skipped: {BINARY} is not set; `make test-services` builds etcd and sets it");
            return None;
        };
        let listeners: Vec<_> =
            (0..2 * size).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap().port()).collect();
        let url = |scheme: &str, port| format!("{scheme}://127.0.0.1:{port}");
        let (clients, peers) = ports.split_at(size);
        let urls: Vec<_> = clients
            .iter()
            .map(|port| url(scheme, port))
            .chain(peers.iter().map(|port| url("http", port)))
            .collect();
        let peers: Vec<_> = (0..size).map(|n| format!("m{n}={}", urls[size + n])).collect();
        drop(listeners);
        let start = |number: usize| {
            let folder = std::env::temp_dir().join(format!(
                "threefs-kv-etcd-{}-{}",
                std::process::id(),
                ports[number]
            ));
            let (client, peer) = (&urls[number], &urls[size + number]);
            let mut arguments = vec![
                binary.clone(),
                format!("--name=m{number}"),
                format!("--data-dir={}", folder.display()),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster={}", peers.join(",")),
                "--log-level=error".into(),
            ];
            arguments.extend(options.iter().map(ToString::to_string));
            let mut member = Member { endpoint: client.clone(), arguments, folder, guard: None };
            member.start();
            member
        };
        Some(Self { members: (0..size).map(start).collect(), next: AtomicU64::new(0) })
    }

    /// A store in the cluster that no other test uses.
    pub(crate) fn config(&self) -> EtcdConfig {
        EtcdConfig {
            endpoints: self.members.iter().map(|member| member.endpoint.clone()).collect(),
            prefix: format!("/test-{}", self.next.fetch_add(1, SeqCst)),
            ..EtcdConfig::default()
        }
    }

    /// The number of the leader.
    pub(crate) async fn leader(&self) -> usize {
        let ask = async {
            loop {
                for (number, member) in self.members.iter().enumerate() {
                    let mut client = member.client().await;
                    let status = tokio::time::timeout(Duration::from_millis(500), client.status());
                    let Ok(Ok(status)) = status.await else { continue };
                    if status.leader() != 0
                        && status.header().is_some_and(|it| it.member_id() == status.leader())
                    {
                        return number;
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ask).await.expect("no leader")
    }
}

impl Member {
    /// Starts the process, with the data of an earlier one.
    pub(crate) fn start(&mut self) {
        let mut guard = Command::new("sh")
            .args(["-c", GUARD, "sh"])
            .arg(&self.folder)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(guard.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        let stdin = guard.stdin.take().unwrap();
        self.guard = Some((guard, stdin, pid));
    }

    pub(crate) async fn client(&self) -> Client {
        let options = ConnectOptions::new().with_connect_timeout(Duration::from_secs(1));
        Client::connect([&self.endpoint], Some(options)).await.unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let (_, _, pid) = self.guard.as_ref().unwrap();
        kill_process(*pid, signal).unwrap();
    }

    /// Ends the process by kill -9; `meanwhile` sees its data.
    pub(crate) fn end(&mut self, meanwhile: impl FnOnce()) {
        let Some((mut guard, _stdin, pid)) = self.guard.take() else { return };
        kill_process(pid, Signal::KILL).unwrap();
        // Not its input: the guard would remove the data.
        guard.kill().unwrap();
        guard.wait().unwrap();
        meanwhile();
    }

    pub(crate) fn folder(&self) -> &std::path::Path {
        &self.folder
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for member in &mut self.members {
            let Some((mut guard, stdin, _)) = member.guard.take() else { continue };
            drop(stdin);
            let _ = guard.wait();
        }
    }
}

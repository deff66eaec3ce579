//! Real PostgreSQL servers from the folder `FIRE_FLYER_POSTGRES`, which `make test-services` sets: a
//! primary and its standbys.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use threefs_kv::PostgresConfig;
use tokio_postgres::{Client, NoTls};

pub(crate) const FOLDER: &str = "FIRE_FLYER_POSTGRES";
const USER: &str = "threefs";
/// Starts a server, prints its process id, and ends it when the test process ends for any reason,
/// or by kill -9, without the removal of its data, when it reads a line.
const GUARD: &str = r#"folder=$1; shift; "$@" </dev/null >"$folder.log" 2>&1 & echo $!
if read -r _; then kill -9 $!; wait; else kill -QUIT $!; wait; rm -rf "$folder" "$folder.log"; fi"#;
/// Processes that end lose nothing; only a failure of the machine would.
const SETTINGS: &str = "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\n\
    max_connections = 400\nshared_buffers = 64MB\nmax_wal_senders = 10\nwal_keep_size = 256MB\n\
    max_wal_size = 512MB\nhot_standby = on\ndynamic_shared_memory_type = mmap\nlog_min_messages = fatal\n";

/// One server.
pub(crate) struct Server {
    pub port: u16,
    folder: PathBuf,
    guard: Option<(Child, ChildStdin, u32)>,
}

/// A primary and its standbys, which end with this value or with the process.
pub(crate) struct Servers {
    pub servers: Vec<Server>,
    next: AtomicU64,
}

/// The programs of PostgreSQL; `None`, with a line, without them.
fn programs() -> Option<PathBuf> {
    match std::env::var(FOLDER).ok().filter(|path| !path.is_empty()) {
        Some(path) => Some(path.into()),
        None => {
            eprintln!(
                "skipped: {FOLDER} is not set; `make test-services` installs PostgreSQL and sets it"
            );
            None
        }
    }
}

/// A command that is not run as root, which PostgreSQL refuses.
fn command(program: &Path) -> Command {
    if !rustix::process::getuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.current_dir("/");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(program);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A folder in memory, if the machine has one: each commit syncs two servers.
fn memory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

/// A folder of the servers' user.
fn new_folder(parent: &Path, port: u16) -> PathBuf {
    let folder = parent.join(format!("threefs-kv-postgres-{}-{port}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    if rustix::process::getuid().is_root() {
        run(Command::new("chown").arg("postgres:postgres").arg(&folder));
    }
    run(Command::new("chmod").arg("700").arg(&folder));
    folder
}

impl Servers {
    /// Starts a primary with standbys, one of which has to acknowledge each commit.
    pub(crate) fn start(standbys: usize) -> Option<Self> {
        Self::start_with(standbys, "")
    }

    /// As [`Servers::start`], with further lines of postgresql.conf.
    pub(crate) fn start_with(standbys: usize, settings: &str) -> Option<Self> {
        Self::start_in(&memory(), standbys, settings)
    }

    /// As [`Servers::start_with`], with the data in a folder.
    pub(crate) fn start_in(parent: &Path, standbys: usize, settings: &str) -> Option<Self> {
        let programs = programs()?;
        let listeners: Vec<_> =
            (0..=standbys).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap().port()).collect();
        drop(listeners);
        let folders: Vec<_> = ports.iter().map(|port| new_folder(parent, *port)).collect();
        run(command(&programs.join("initdb"))
            .args(["-A", "trust", "-U", USER, "--no-sync", "--wal-segsize=1", "--locale=C"])
            .arg("-D")
            .arg(&folders[0]));
        let synchronous = if standbys > 0 { "ANY 1 (*)" } else { "" };
        let path = folders[0].join("postgresql.conf");
        let written = std::fs::read_to_string(&path).unwrap();
        let settings =
            format!("{written}\n{SETTINGS}synchronous_standby_names = '{synchronous}'\n{settings}");
        std::fs::write(&path, settings).unwrap();
        let mut servers: Vec<Server> = Vec::new();
        for (port, folder) in ports.iter().zip(folders) {
            if let Some(primary) = servers.first() {
                primary.wait();
                run(command(&programs.join("pg_basebackup"))
                    .args(["-R", "-c", "fast", "-X", "stream", "--no-sync", "-h", "127.0.0.1"])
                    .args(["-p", &primary.port.to_string(), "-U", USER, "-D"])
                    .arg(&folder));
            }
            let mut server = Server { port: *port, folder, guard: None };
            server.start();
            servers.push(server);
        }
        servers.iter().for_each(Server::wait);
        Some(Self { servers, next: AtomicU64::new(0) })
    }

    /// Lets a standby follow another server, which was promoted.
    pub(crate) async fn follow(&self, standby: usize, primary: usize) {
        let client = self.servers[standby].client().await;
        let port = self.servers[primary].port;
        let source = format!("host=127.0.0.1 port={port} user={USER}");
        let set = format!("ALTER SYSTEM SET primary_conninfo = '{source}'");
        client.batch_execute(&set).await.unwrap();
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    }

    /// Waits until the first standby has everything.
    pub(crate) async fn caught_up(&self) {
        let primary = self.servers[0].client().await;
        let behind = "SELECT 1 FROM pg_stat_replication WHERE flush_lsn = pg_current_wal_lsn()";
        let waiting = async {
            while primary.query_opt(behind, &[]).await.unwrap().is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap();
    }

    /// A store that no other test uses.
    pub(crate) fn config(&self) -> PostgresConfig {
        let hosts: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        PostgresConfig {
            url: format!("postgresql://{USER}@{}/postgres", hosts.join(",")),
            schema: format!("test_{}", self.next.fetch_add(1, SeqCst)),
            ..PostgresConfig::default()
        }
    }
}

impl Server {
    /// Starts the process, with the data of an earlier one.
    pub(crate) fn start(&mut self) {
        let Some(programs) = programs() else { return };
        let server = command(&programs.join("postgres"));
        let mut guard = Command::new("sh")
            .args(["-c", GUARD, "sh"])
            .arg(&self.folder)
            .arg(server.get_program())
            .args(server.get_args())
            .args(["-p", &self.port.to_string(), "-D"])
            .arg(&self.folder)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(guard.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = line.trim().parse().unwrap();
        let stdin = guard.stdin.take().unwrap();
        self.guard = Some((guard, stdin, pid));
    }

    /// Copies a file into the folder of the server, which only the server can read.
    pub(crate) fn install(&self, file: &Path, name: &str) {
        let target = self.folder.join(name);
        std::fs::copy(file, &target).unwrap();
        run(Command::new("chmod").arg("600").arg(&target));
        if rustix::process::getuid().is_root() {
            run(Command::new("chown").arg("postgres:postgres").arg(&target));
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.with_extension("log")
    }

    /// Waits until it accepts connections.
    pub(crate) fn wait(&self) {
        let mut ask = Command::new(programs().unwrap().join("pg_isready"));
        ask.args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()]);
        let deadline = Instant::now() + Duration::from_secs(120);
        while !ask.status().unwrap().success() {
            let log = std::fs::read_to_string(self.log());
            assert!(Instant::now() < deadline, "no server at {}: {log:?}", self.port);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes a standby the primary.
    pub(crate) fn promote(&self) {
        let programs = programs().unwrap();
        run(command(&programs.join("pg_ctl"))
            .args(["promote", "-t", "120", "-D"])
            .arg(&self.folder));
    }

    pub(crate) async fn client(&self) -> Client {
        let url = format!("postgresql://{USER}@127.0.0.1:{}/postgres", self.port);
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Ends the server by kill -9 of all its processes, as a failure of its machine does; its data
    /// stays. Processes that outlive the first one show commits that no standby has.
    pub(crate) fn end(&mut self) {
        let Some((mut guard, mut stdin, pid)) = self.guard.take() else { return };
        // It starts no further ones.
        signal(pid, Signal::STOP);
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(children).unwrap();
        children.split_whitespace().for_each(|child| signal(child.parse().unwrap(), Signal::KILL));
        stdin.write_all(b"kill\n").unwrap();
        guard.wait().unwrap();
        // A new server cannot start before they have ended.
        let deadline = Instant::now() + Duration::from_secs(120);
        for child in children.split_whitespace() {
            while runs(child) {
                assert!(Instant::now() < deadline, "process {child} of the server still runs");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Sends a signal to a process that may have ended.
fn signal(process: u32, signal: Signal) {
    let process = Pid::from_raw(process as i32).unwrap();
    let sent = kill_process(process, signal);
    assert!(matches!(sent, Ok(()) | Err(Errno::SRCH)), "{sent:?}");
}

/// Whether a process has not ended; one whose status was not collected counts as ended.
fn runs(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(')').next().is_some_and(|it| it.starts_with(" Z")))
}

impl Drop for Servers {
    fn drop(&mut self) {
        for server in &mut self.servers {
            match server.guard.take() {
                Some((mut guard, stdin, _)) => {
                    drop(stdin);
                    let _ = guard.wait();
                }
                None => {
                    let _ = std::fs::remove_dir_all(&server.folder);
                    let _ = std::fs::remove_file(server.log());
                }
            }
        }
    }
}

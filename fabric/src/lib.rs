//! Transport layer shared by the collectives and the file system: authentication (`auth`), traffic
//! classes (`class`), address selection (`interfaces`), descriptor limits (`descriptors`),
//! deadlines (`deadline`), boot-time instants (`boot_instant`), TLS (`tls`), atomics that a model
//! checker can replace (`atomics`), and the transports: TCP, shared memory and remote calls.
//!
//! The crate does not interpret the messages that it carries.

use std::pin::Pin;

pub mod arena;
pub mod atomics;
pub mod auth;
pub mod boot_instant;
pub mod class;
pub mod deadline;
pub mod descriptors;
mod fault;
pub mod fork;
pub mod interfaces;
pub mod rpc;
pub mod shm;
pub mod tcp;
pub mod tls;

/// A boxed future. An `async fn` is compiled again in every crate that awaits it; the entry points
/// of the services are boxed so that they are compiled once.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

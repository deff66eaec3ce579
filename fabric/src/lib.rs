//! What collectives and storage share on the wire: who may speak (`auth`; `handshake`, `keys`,
//! `ticket`, `capability` and `credentials` for remote calls), in which traffic class (`class`), at
//! which address (`interfaces`), over how many descriptors (`descriptors`), for how long a wait may
//! last (`deadline`), until when a right lasts (`moment`), whether connections are encrypted (`tls`), and the transports themselves.
//!
//! Absent on purpose: any knowledge of what the bytes mean.

use std::pin::Pin;

pub mod arena;
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

/// A future that is compiled in the crate that makes it. What an `async fn` does is compiled anew
/// in every crate that waits for it; the services' entry points are boxed for that reason.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

//! What collectives and storage share on the wire: who may speak (`auth`), in which traffic class
//! (`class`), for how long a wait may last (`deadline`), and the transports themselves.
//!
//! Absent on purpose: any knowledge of what the bytes mean.

pub mod auth;
pub mod class;
pub mod deadline;
pub mod rpc;
pub mod shm;
pub mod tcp;

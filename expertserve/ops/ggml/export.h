/* EXPORT: what Python finds by name in the shared library. */
#ifndef EXPERTSERVE_EXPORT_H
#define EXPERTSERVE_EXPORT_H

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#endif

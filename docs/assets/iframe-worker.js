/* The search of pages that are opened from a folder: browsers start no workers there, so the script of the worker runs in a
   hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.answer(data))
      inside.importScripts = (...urls) => Promise.all(urls.map(script => this.load(script)))
      this.load(url).then(() => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.ask(data))
      })
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.frame.contentDocument.body.appendChild(script)
      })
    }

    ask(data) {
      const inside = this.frame.contentWindow
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }

    postMessage(data) {
      this.waiting ? this.waiting.push(data) : this.ask(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
